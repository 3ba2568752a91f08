"""`python -m train matrix`: does a run that one strategy saved go on the same under another?

Trains a few steps under each strategy on four ranks, resumes each from its checkpoint in the middle
under each strategy on two ranks, and compares the losses that follow with those of one process
that was never interrupted.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from train.config import ConfigError, parse
from train.run import RunDir, read_lines

STRATEGIES = ("ddp", "zero1", "zero3", "hsdp", "pipeline", "tensor")
SAVED_ON, RESUMED_ON, RANKS_OF_A_NODE = 4, 2, 2
STEPS, SAVED_AT = 8, 4
WORDS = (
    "digits",
    "device=cpu",
    f"train.steps={STEPS}",
    "train.evaluate_every=null",
    "optim.warmup_steps=0",
    "optim.clip_norm=0.2",
    "data.global_batch=50",
    "data.micro_batch=13",
    f"checkpoint.every={SAVED_AT}",
    "log.every=1",
)
TOLERANCE = 1e-6
"""Relative difference of a loss: sums in fp32, in another order."""
TIMEOUT = 600
"""Seconds for all runs of one number of ranks."""


class Job(NamedTuple):
    """One run among those that a group of ranks does one after the other."""

    root: Path
    words: Sequence[str]

    @property
    def run_dir(self) -> RunDir:
        """Where it leaves everything."""
        return RunDir(self.root, "run")

    def losses(self) -> list[float]:
        """Of each step, then of the evaluation."""
        lines = [line["loss"] for line in read_lines(self.run_dir.metrics)]
        ends = [line for line in read_lines(self.run_dir.events) if line["event"] == "evaluated"]
        return [*lines, ends[-1]["loss"]]


def main(words: Sequence[str]) -> int:
    """Print the matrix; 0 if every cell holds.

    Args:
        words: further `key=value` of all runs.
    """
    if "--help" in words or "-h" in words:
        print("Usage: python -m train matrix [key=value ...]\n\n" + (__doc__ or ""), end="")
        return 0
    try:
        parse([*WORDS, *words])
        with tempfile.TemporaryDirectory(prefix="rollcall-matrix-") as scratch:
            cells = measure(Path(scratch), words)
    except (ConfigError, RuntimeError) as error:
        print(f"rollcall: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(table(cells))
    return int(not all(difference <= TOLERANCE for difference in cells.values()))


def measure(scratch: Path, words: Sequence[str] = ()) -> dict[tuple[str, str], float]:
    """The largest relative difference of a loss after each resume, by (saved as, resumed as).

    Raises:
        RuntimeError: a run failed; with its output.
    """
    alone = Job(scratch / "alone", [*WORDS, *words, "parallel.strategy=single"])
    saved = {
        name: Job(scratch / f"saved-{name}", [*WORDS, *words, f"parallel.strategy={name}"])
        for name in STRATEGIES
    }
    run([alone], scratch / "logs-1", 1)
    run(list(saved.values()), scratch / "logs-4", SAVED_ON, RANKS_OF_A_NODE)
    cells = {
        (source, target): Job(
            scratch / f"{source}-{target}", [*WORDS, *words, f"parallel.strategy={target}"]
        )
        for source in STRATEGIES
        for target in STRATEGIES
    }
    for (source, _), job in cells.items():
        checkpoint = saved[source].run_dir.checkpoints / f"step-{SAVED_AT:08d}"
        shutil.copytree(checkpoint, job.run_dir.checkpoints / checkpoint.name)
    run(list(cells.values()), scratch / "logs-2", RESUMED_ON, RANKS_OF_A_NODE)
    expected = alone.losses()[SAVED_AT:]
    return {names: difference(job.losses(), expected) for names, job in cells.items()}


def difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference."""
    pairs = list(zip(found, expected, strict=True))
    return max(abs(a - b) / abs(b) for a, b in pairs)


def table(cells: Mapping[tuple[str, str], float]) -> str:
    """The matrix as text."""
    sources = list(dict.fromkeys(source for source, _ in cells))
    targets = list(dict.fromkeys(target for _, target in cells))
    held = sum(found <= TOLERANCE for found in cells.values())
    lines = [
        f"largest relative difference of the losses of steps {SAVED_AT + 1} to {STEPS} and the "
        "evaluation",
        f"from those of one process; saved on {SAVED_ON} ranks (rows), resumed on {RESUMED_ON} "
        "(columns)",
        "",
        "".join(f"{word:>10}" for word in ["", *targets]),
        *(
            f"{source:>10}" + "".join(f"{cells[source, target]:>10.1e}" for target in targets)
            for source in sources
        ),
        "",
        f"{held} of {len(cells)} within {TOLERANCE:.0e}",
    ]
    return "\n".join(lines)


def run(
    jobs: Sequence[Job],
    logs: Path,
    world_size: int,
    ranks_of_a_node: int = 1,
    prepare: Callable[[], None] | None = None,
) -> None:
    """Do all runs one after the other on one group of new ranks of this machine.

    Args:
        prepare: called on every rank before the first run; importable by its name.

    Raises:
        RuntimeError: a rank failed; with its output.
    """
    logs.mkdir(parents=True, exist_ok=True)
    # Ranks are forked from a server that has imported torch once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train.loop", "torch._dynamo", "sklearn.datasets"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": ranks_of_a_node,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    ranks = [
        context.Process(
            target=_be_rank,
            args=(
                {**place, "RANK": rank, "LOCAL_RANK": rank % ranks_of_a_node},
                logs / f"rank-{rank}.log",
                jobs,
                prepare,
            ),
        )
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + TIMEOUT
    while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
        multiprocessing.connection.wait(
            [rank.sentinel for rank in ranks if rank.is_alive()], deadline - time.monotonic()
        )
        if time.monotonic() > deadline:
            break
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    if any(codes) or None in codes:
        output = "\n".join(log.read_text() for log in sorted(logs.iterdir()))
        raise RuntimeError(f"{world_size} ranks ended with {codes}:\n{output}")


def _be_rank(
    place: Mapping[str, object],
    log: Path,
    jobs: Sequence[Job],
    prepare: Callable[[], None] | None,
) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update({name: str(value) for name, value in place.items()})
    import torch

    from train.__main__ import train
    from train.stop import StopSignals
    from train.world import World

    torch.set_num_threads(1)  # several ranks share the cores
    if prepare:
        prepare()
    with StopSignals() as stop:
        world = World.join("cpu")
        for job in jobs:
            print(f"{job.root.name}: {' '.join(job.words)}", flush=True)
            config = parse([*job.words, f"run.root={job.root}", "run.name=run"])[1]
            train("matrix", config, world, stop)
        world.leave()
