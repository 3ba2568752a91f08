"""Runs that a group of ranks on this machine does one after the other."""

import gc
import math
import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rollcall.config import parse
from rollcall.records.run_dir import RunDir
from rollcall.system import hosts
from rollcall.train import torch_private

STEPS, SAVED_AT = 8, 4
WORDS = (
    *("digits", "device=cpu", f"train.steps={STEPS}", f"checkpoint.every={SAVED_AT}"),
    *("train.evaluate_every=null", "optim.warmup_steps=0", "optim.clip_norm=0.2", "log.every=1"),
    *("data.global_batch=50", "data.micro_batch=13"),
)
TOLERANCE = 1e-6  # allowed relative difference of a loss: fp32 sums in another order
TIMEOUT = 120  # seconds for a run, of which several share a group of ranks


class Job(NamedTuple):
    """One of several runs that a group of ranks does one after the other."""

    root: Path
    words: Sequence[str]

    @property
    def run_dir(self) -> RunDir:
        """The directory of the run."""
        return RunDir(self.root, "run")

    def losses(self) -> list[float]:
        """Return the losses of all steps, then the loss of the evaluation."""
        evaluated = self.run_dir.read_events("evaluated")[-1]
        return [*(line.loss for line in self.run_dir.read_metrics()), evaluated["loss"]]


def apart(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference; NaN, which `max` may pass over, if there is one."""
    found = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    return max(found, key=lambda it: (math.isnan(it), it))


def run(
    jobs: Sequence[Job],
    logs: Path,
    world_size: int,
    per_node: int = 1,
    prepare: Callable[[], None] | None = None,  # called on every rank before the first run
) -> None:
    """Do all runs one after the other on one group of ranks; see `on_ranks`."""
    on_ranks(partial(_do, jobs, prepare), logs, world_size, per_node, TIMEOUT * len(jobs))


def on_ranks(
    work: Callable[[], object],
    logs: Path,  # where each rank's output goes
    world_size: int,
    per_node: int = 1,
    seconds: float = 600,  # after which the ranks are killed
) -> None:
    """Do some work on every one of a group of new ranks on this machine.

    Raises:
        RuntimeError: a rank failed; the message has all output.
    """
    logs.mkdir(parents=True, exist_ok=True)
    # Ranks are forked from a server that imported torch once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rollcall.train.training", torch_private.COMPILER])
    port, ranks = hosts.free_port(), []
    try:
        for rank in range(world_size):
            place: dict[str, object] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            place |= {"RANK": rank, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
            # The second one, because this process may be a rank of another world.
            place |= dict.fromkeys(("WORLD_SIZE", "ROLLCALL_WORLD_SIZE"), world_size)
            log = logs / f"rank-{rank}.log"
            process = context.Process(target=_be_rank, args=(place, log, work))
            process.start()
            ranks.append(process)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not any(process.exitcode for process in ranks):
            alive = [process.sentinel for process in ranks if process.is_alive()]
            if not alive:
                break
            multiprocessing.connection.wait(alive, max(0, deadline - time.monotonic()))
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    if any(codes) or None in codes:
        output = "\n".join(log.read_text() for log in sorted(logs.iterdir()))
        raise RuntimeError(f"{world_size} ranks ended with {codes}:\n{output}")


def _be_rank(place: Mapping[str, object], log: Path, work: Callable[[], object]) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update({name: str(value) for name, value in place.items()})
    import torch

    torch.set_num_threads(1)  # several ranks share the cores
    gc.freeze()  # each run makes a collection, which leaves out what was imported
    gc.enable()
    work()


def _do(jobs: Sequence[Job], prepare: Callable[[], None] | None) -> None:
    from rollcall.train.ranks.signals import StopSignals
    from rollcall.train.ranks.world import World
    from rollcall.train.training import train

    if prepare:
        prepare()
    with StopSignals() as stop:
        world = World.join(parse(jobs[0].words)[1].device)
        for job in jobs:
            print(f"{job.root.name}: {' '.join(job.words)}", flush=True)
            train("bench", parse([*job.words, *job.run_dir.words])[1], world, stop)
        world.leave()
