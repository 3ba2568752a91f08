"""Ranks for tests: processes forked from one server that imports torch once."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.system.hosts import free_port

# Read when the server imports torch. With more threads, four ranks would compete for two cores.
os.environ["OMP_NUM_THREADS"] = "1"
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    ["tests.helpers.imports", "rollcall.train.training", "torch._dynamo", "sklearn.datasets"]
)
TIMEOUT = 500


def together(
    count: int, work: Callable[[int, Path], None], folder: Path, per_node: int = 1
) -> None:
    """Do `work(rank, folder)` on every rank of a new group, and check that all of them end well."""
    port = free_port()
    ranks = [
        FORKSERVER.Process(target=_do, args=(rank, count, per_node, port, work, folder))
        for rank in range(count)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT)
        process.kill()
    assert [process.exitcode for process in ranks] == [0] * count


def _do(  # a rank of `together`
    rank: int, count: int, per_node: int, port: int, work: Callable[[int, Path], None], folder: Path
) -> None:
    _leave_out_imports()
    place = {"RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
    place |= {"LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    work(rank, folder)


class Ranks:
    """`python -m train WORDS` on several ranks of this machine, with torchrun's variables."""

    def __init__(
        self,
        world_size: int,
        words: list[str],
        logs: Path,
        env: Mapping[str, str] | None = None,
        node_size: int | None = None,
    ) -> None:
        self.logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        port = free_port()
        node_size = node_size or world_size
        self.processes: list[BaseProcess] = []
        for rank in range(world_size):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % node_size),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(node_size),
                "GROUP_RANK": str(rank // node_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                **(env or {}),
            }
            process = FORKSERVER.Process(
                target=_run_rank, args=(words, place, self.log(rank), str(Path.cwd()))
            )
            process.start()
            self.processes.append(process)

    def log(self, rank: int) -> Path:
        """The file with this rank's output."""
        return self.logs / f"rank-{rank}.log"

    def output(self) -> str:
        """The output of all ranks."""
        return "".join(self.log(rank).read_text() for rank in range(len(self.processes)))

    def wait(self) -> list[int | None]:
        """Return the exit codes (the negative signal for a killed rank); kill ranks that hang."""
        deadline = time.monotonic() + TIMEOUT
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.kill()
        return codes

    def kill(self) -> None:
        """Kill all ranks at once, like a power cut."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def alone(words: list[str], log: Path, **env: str) -> BaseProcess:
    """Start `python -m train WORDS` as one process that no launcher has started."""
    process = FORKSERVER.Process(target=_run_rank, args=(words, env, log, str(Path.cwd())))
    process.start()
    return process


def train(world_size: int, words: list[str], logs: Path) -> str:
    """Train to the end; return the output of all ranks.

    Raises:
        AssertionError: a rank did not exit with code 0.
    """
    ranks = Ranks(world_size, words, logs)
    codes = ranks.wait()
    assert codes == [0] * world_size, f"exit codes {codes}\n{ranks.output()}"
    return ranks.output()


def leave_out_operations() -> None:
    """Count no operations in this rank, which takes longer than a short run of a transformer.

    For tests of numbers that ranks train; tests/multi/train/profiling/test_flops.py counts them.
    """
    from rollcall.train.profiling import flops

    setattr(flops, "factors", lambda *_: ({}, ""))  # noqa: B010


def logged_steps(run_dir: RunDir) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl about training steps, not about validations."""
    return [line for line in read_lines(run_dir.metrics) if "loss" in line]


def steps_without_a_line(run_dir: RunDir) -> set[int]:
    """Return the steps that metrics.jsonl should have but has not; each has one line at most.

    A step that was saved after the loss of a rank may have none, and the step before it: rank 0
    writes the line of a step during the next one.
    """
    steps = [line["step"] for line in logged_steps(run_dir)]
    assert len({*steps}) == len(steps)
    rescued = [line["step"] for line in run_dir.read_events("rescued")]
    before = [step - 1 for step in rescued]
    return set(range(1, max(steps) + 1)) - {*steps, *rescued, *before}


def _run_rank(words: list[str], env: Mapping[str, str], log: Path, cwd: str) -> None:
    from rollcall.train.main import main

    _leave_out_imports()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(env)
    os.chdir(cwd)
    sys.path.insert(0, cwd)  # as `python -m` does
    sys.exit(main(words))


def _leave_out_imports() -> None:
    """Let collections leave out what was imported: each run makes one, which takes 0.3 s of it."""
    gc.freeze()
    gc.enable()
