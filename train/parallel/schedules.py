"""In which order do micro-batches run through the stages of a pipeline, and how many must there be?

GPipe, https://arxiv.org/abs/1811.06965; 1F1B, https://arxiv.org/abs/1806.03377; interleaved 1F1B,
https://arxiv.org/abs/2104.04473; breadth-first, https://arxiv.org/abs/2211.05953; zero-bubble and
ZBV, https://arxiv.org/abs/2401.10241; DualPipe, https://arxiv.org/abs/2412.19437.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed import pipelining

from train.schema import ConfigError, Parallel


def _any(count: int, ranks: int, stages: int) -> str:  # noqa: ARG001
    return ""


def _as_many_as_stages(count: int, ranks: int, stages: int) -> str:  # noqa: ARG001
    return f"it needs at least {stages}" if count < stages else ""


def _whole_rounds(count: int, ranks: int, stages: int) -> str:  # noqa: ARG001
    rounds = max(1, count // ranks)
    return f"in rounds of {ranks} or more it needs a multiple of {rounds}" if count % rounds else ""


class Schedule(NamedTuple):
    """An order of the work.

    Attributes:
        run: torch's class.
        complaint: about a number of micro-batches that it cannot run, of (count, ranks, stages).
        looped: whether a rank has several stages.
        v_shaped: the stages go over the ranks forth and back, so the first rank has the last too.
        since: the first torch that runs it.
    """

    run: Callable[..., Any]
    complaint: Callable[[int, int, int], str] = _any
    looped: bool = False
    v_shaped: bool = False
    since: tuple[int, int] = (2, 11)


SCHEDULES = {
    "1f1b": Schedule(pipelining.Schedule1F1B, _as_many_as_stages),
    "gpipe": Schedule(pipelining.ScheduleGPipe),
    # One micro-batch after the other goes forth and back: a GPipe of one, many times.
    "sequential": Schedule(pipelining.ScheduleGPipe),
    "interleaved": Schedule(pipelining.ScheduleInterleaved1F1B, _whole_rounds, looped=True),
    "breadth-first": Schedule(pipelining.ScheduleLoopedBFS, looped=True),
    "zero-bubble": Schedule(pipelining.ScheduleInterleavedZeroBubble, _whole_rounds, looped=True),
    "zbv": Schedule(pipelining.ScheduleZBVZeroBubble, v_shaped=True, looped=True, since=(2, 15)),
    "dualpipev": Schedule(
        pipelining.ScheduleDualPipeV,
        _as_many_as_stages,
        looped=True,
        v_shaped=True,
        since=(2, 15),
    ),
}


def owners(schedule: Schedule, ranks: int, per_rank: int) -> list[int]:
    """The rank of each stage."""
    forth = list(range(ranks))
    loops = [forth[:: -1 if schedule.v_shaped and loop % 2 else 1] for loop in range(per_rank)]
    return [rank for loop in loops for rank in loop]


def check_version(name: str) -> None:
    """Refuse a schedule that this torch cannot run.

    Raises:
        ConfigError: names the version that can.
    """
    since = SCHEDULES[name].since
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < since:
        raise ConfigError(
            f"parallel.schedule={name} needs torch {since[0]}.{since[1]}: torch "
            f"{torch.__version__} fails in it with 'Pair is not connected'; choose "
            "parallel.schedule=zero-bubble"
        )


def micro_batch(options: Parallel, asked: int | None, share: int, ranks: int, stages: int) -> int:
    """Samples of a micro-batch.

    Args:
        asked: data.micro_batch; None takes the largest that the schedule can run.
        share: samples of a step that these ranks compute.

    Raises:
        ConfigError: the schedule cannot run as many micro-batches as that makes.
    """
    name = options.schedule_name
    complaint = SCHEDULES[name].complaint

    def problem(size: int) -> str:
        return complaint(math.ceil(share / size), ranks, stages)

    fitting = [size for size in range(1, share + 1) if not problem(size)]
    if asked is None:
        most = math.ceil(share / (1 if name == "sequential" else ranks))
        asked = max((size for size in fitting if size <= most), default=most)
    if asked in fitting or not problem(asked):
        return asked
    nearest = min(fitting, key=lambda size: (abs(size - asked), size), default=None)
    raise ConfigError(
        f"{share} samples in micro-batches of data.micro_batch={asked} are "
        f"{math.ceil(share / asked)}, which parallel.schedule={name} cannot run over "
        f"{stages} stages on {ranks} ranks: {problem(asked)}; choose "
        + (f"data.micro_batch={nearest}, or " if nearest else "")
        + "parallel.schedule=gpipe"
    )
