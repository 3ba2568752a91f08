"""Runs on simulated nodes of this machine, and the loss of their ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from checkout import ROOT
from disks import until

from rollcall.records.run_dir import RunDir
from rollcall.train.checkpoint import layout
from rollcall.train.checkpoint.manifest import read_named
from rollcall.train.checkpoint.read import nested

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py"), "--local", "--wait"]
WORDS = ["digits", "device=cpu", "model.name=mlp", "optim.schedule=constant", "log.every=1"]
WORDS += ["checkpoint.every=null", "train.evaluate_every=null", "data.global_batch=48"]
CONTINUE = "faults.on_lost_rank=continue"
TIMEOUT = 300.0


@contextlib.contextmanager
def submitted(
    root: Path, name: str, nodes: int, per_node: int, *words: str
) -> Iterator[tuple[RunDir, Callable[[], str]]]:
    """Start a run; yield it, and what waits for its end and returns the output if it failed."""
    place = [f"--nodes={nodes}", f"--nproc-per-node={per_node}", f"--name={name}"]
    root.mkdir(parents=True, exist_ok=True)
    log = root / f"{name}.out"
    with log.open("ab") as out:
        words = (*SUBMIT, *place, f"--root={root}", *WORDS, *words)
        process = subprocess.Popen(words, stdout=out, stderr=out, cwd=ROOT)
    run = RunDir(root, name)
    try:
        yield run, lambda: log.read_text() if process.wait(TIMEOUT) else ""
    finally:
        if process.poll() is None:
            cancel = [sys.executable, "-m", "launch", "cancel", str(run.path)]
            subprocess.run(cancel, cwd=ROOT, capture_output=True, check=False)
            process.wait(TIMEOUT)


def pid_of(run: RunDir, rank: int) -> int | None:
    """Return the process of a rank, by the log that it writes."""
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            log = path.readlink()
            if log.is_relative_to(run.path.resolve()) and log.name == f"rank-{rank}.log":
                parent = Path("/proc", path.parts[2], "stat").read_text().rpartition(")")[2]
                if not _writes_to(int(parent.split()[1]), log):  # not a child of the rank's
                    return int(path.parts[2])
    return None


def _writes_to(pid: int, log: Path) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/fd/1").readlink() == log
    return False


def kill(run: RunDir, rank: int) -> float:
    """Kill a rank that lives; return when."""
    until(lambda: pid_of(run, rank) is not None)
    when = time.time()
    os.kill(pid_of(run, rank) or 0, signal.SIGKILL)
    return when


def steps_of(run: RunDir) -> list[int]:
    """Return the steps that a run has logged."""
    return [line.step for line in run.read_metrics()] if run.metrics.exists() else []


def await_step(run: RunDir, step: int) -> None:
    """Wait until a step is logged."""
    until(lambda: max([0, *steps_of(run)]) >= step, TIMEOUT)


def await_ranks(run: RunDir, ranks: int, after: float) -> float:
    """Wait until this number of ranks trains, after a time; return when the first step ended."""

    def first_steps() -> list[float]:
        found, size = [], 0
        for event in run.read_events():
            size = event.get("world_size", size)
            if event["event"] == "first_step" and event["time"] > after and size == ranks:
                found.append(event["time"])
        return found

    until(lambda: bool(first_steps()), TIMEOUT)
    return min(first_steps())


def weights(run: RunDir, step: int) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint, by name."""
    path = layout.path_of(run.checkpoints, step)
    found: dict[str, torch.Tensor] = nested(path, read_named(path), "model")["model"]
    return found


def gap(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two sets of weights, relative to the largest weight."""
    assert first.keys() == second.keys()
    largest = max(float(tensor.abs().max()) for tensor in first.values())
    return max(float((first[n] - second[n]).abs().max()) for n in first) / largest
