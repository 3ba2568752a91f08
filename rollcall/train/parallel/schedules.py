"""Pipeline schedules, and the micro-batches that each can run.

GPipe, https://arxiv.org/abs/1811.06965; 1F1B, https://arxiv.org/abs/1806.03377; interleaved 1F1B,
https://arxiv.org/abs/2104.04473; breadth-first, https://arxiv.org/abs/2211.05953; zero-bubble and
ZBV, https://arxiv.org/abs/2401.10241; DualPipe, https://arxiv.org/abs/2412.19437.
"""

import math
from typing import Any

from torch import nn
from torch.distributed import pipelining

from rollcall.config.checks import SPLIT_BACKWARD, V_SHAPED
from rollcall.config.schema import ConfigError, Parallel
from rollcall.train.weights.deferred import tensors_of

SCHEDULES: dict[str, type[Any]] = {
    "1f1b": pipelining.Schedule1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "sequential": pipelining.ScheduleGPipe,  # with a single micro-batch, many times
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "breadth-first": pipelining.ScheduleLoopedBFS,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}


def _problem(name: str, count: int, ranks: int, stages: int) -> str:
    """Return why a schedule cannot run this number of micro-batches; empty if it can."""
    if name in ("1f1b", "dualpipev") and count < stages:
        return f"it needs at least {stages}"
    rounds = max(1, count // ranks)
    if name in ("interleaved", "zero-bubble") and count % rounds:
        return f"in rounds of {ranks} or more it needs a multiple of {rounds}"
    return ""


def owners(schedule: str, ranks: int, per_rank: int) -> list[int]:
    """Return the rank of each stage."""
    forth = list(range(ranks))
    loops = [forth[:: -1 if schedule in V_SHAPED and loop % 2 else 1] for loop in range(per_rank)]
    return [rank for loop in loops for rank in loop]


def check_shared(name: str, stage: nn.Module) -> None:
    """Raise ConfigError if a schedule cannot run a stage because its layers share a weight.

    torch computes such a weight's gradient twice from the same activations, which are gone the
    second time (2.15).
    """
    for places, weight in tensors_of(stage):
        if name in SPLIT_BACKWARD and weight.requires_grad and len(places) > 1:
            raise ConfigError(
                f"parallel.schedule={name}: {places[0]} and {places[1]} share a weight, which this "
                "schedule does not support; choose parallel.schedule=interleaved"
            )


def micro_batch(options: Parallel, asked: int | None, share: int, ranks: int, stages: int) -> int:
    """Return the samples of a micro-batch: as `asked`, or the largest that the schedule can run.

    Raise ConfigError if the schedule cannot run the resulting number of micro-batches.
    """
    name = options.schedule_name

    def problem(size: int) -> str:
        return _problem(name, math.ceil(share / size), ranks, stages)

    fitting = [size for size in range(1, share + 1) if not problem(size)]
    if asked is None:
        most = math.ceil(share / (1 if name == "sequential" else ranks))
        asked = max((size for size in fitting if size <= most), default=most)
    if asked in fitting or not problem(asked):
        return asked
    nearest = min(fitting, key=lambda size: (abs(size - asked), size), default=None)
    raise ConfigError(
        f"data.micro_batch={asked} makes {math.ceil(share / asked)} micro-batches of {share} "
        f"samples, which parallel.schedule={name} cannot run over {stages} stages on {ranks} "
        f"ranks: {problem(asked)}; choose "
        + (f"data.micro_batch={nearest}, or " if nearest else "")
        + "parallel.schedule=gpipe"
    )
