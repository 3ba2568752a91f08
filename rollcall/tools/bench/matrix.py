"""`rollcall matrix`: resume runs of each strategy under each other one, and compare the losses.

It trains a few steps under each strategy on four ranks, resumes each run from its checkpoint in the
middle under each strategy on two ranks, and compares the following losses with an undisturbed run
of one process.
"""

import gc
import math
import multiprocessing
import multiprocessing.connection
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rollcall.config import ConfigError, parse
from rollcall.records.run_dir import RunDir
from rollcall.system import hosts
from rollcall.train import torch_private

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
"""Allowed relative difference of a loss: fp32 sums in another order."""
TIMEOUT = 120
"""Seconds for a run, of which several share a group of ranks."""


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
        lines = [line.loss for line in self.run_dir.read_metrics()]
        ends = self.run_dir.read_events("evaluated")
        return [*lines, ends[-1]["loss"]]


def main(words: Sequence[str]) -> int:
    """Print the matrix, `words` being keys for all runs; return 0 if no difference is too large."""
    if "--help" in words or "-h" in words:
        print("Usage: rollcall matrix [key=value ...]\n\n" + (__doc__ or ""), end="")
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
    """Return the largest relative difference of a loss, by strategies that saved and resumed."""

    def job(name: str, strategy: str) -> Job:
        return Job(scratch / name, [*WORDS, *words, f"parallel.strategy={strategy}"])

    alone = job("alone", "single")
    saved = {name: job(f"saved-{name}", name) for name in STRATEGIES}
    run([alone], scratch / "logs-1", 1)
    run(list(saved.values()), scratch / "logs-4", SAVED_ON, RANKS_OF_A_NODE)
    cells = {
        (source, target): job(f"{source}-{target}", target)
        for source in STRATEGIES
        for target in STRATEGIES
    }
    for (source, _), resumed in cells.items():
        checkpoint = saved[source].run_dir.checkpoints / f"step-{SAVED_AT:08d}"
        shutil.copytree(checkpoint, resumed.run_dir.checkpoints / checkpoint.name)
    run(list(cells.values()), scratch / "logs-2", RESUMED_ON, RANKS_OF_A_NODE)
    expected = alone.losses()[SAVED_AT:]
    return {names: apart(one.losses(), expected) for names, one in cells.items()}


def apart(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference; NaN, which `max` may pass over, if there is one."""
    found = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    return max(found, key=lambda it: (math.isnan(it), it))


def table(cells: Mapping[tuple[str, str], float]) -> str:
    """Return the matrix as text."""
    sources = list(dict.fromkeys(source for source, _ in cells))
    targets = list(dict.fromkeys(target for _, target in cells))
    held = sum(found <= TOLERANCE for found in cells.values())
    lines = [
        f"largest relative difference from one process, of the losses of steps {SAVED_AT + 1} to "
        f"{STEPS} and the evaluation;",
        f"rows: saved on {SAVED_ON} ranks, columns: resumed on {RESUMED_ON} ranks",
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
    prepare: Callable[[], None] | None = None,  # called on every rank before the first run
) -> None:
    """Do all runs one after the other on one group of ranks; see `on_ranks`."""
    work = partial(_do, jobs, prepare)
    on_ranks(work, logs, world_size, ranks_of_a_node, TIMEOUT * len(jobs))


def on_ranks(
    work: Callable[[], object],
    logs: Path,  # where each rank's output goes
    world_size: int,
    ranks_of_a_node: int = 1,
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
            place |= {"RANK": rank, "LOCAL_RANK": rank % ranks_of_a_node}
            # The second one, because this process may be a rank of another world.
            place |= dict.fromkeys(("WORLD_SIZE", "ROLLCALL_WORLD_SIZE"), world_size)
            place["LOCAL_WORLD_SIZE"] = ranks_of_a_node
            given = place, logs / f"rank-{rank}.log", work
            process = context.Process(target=_be_rank, args=given)
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
            config = parse([*job.words, *job.run_dir.words])[1]
            train("matrix", config, world, stop)
        world.leave()
