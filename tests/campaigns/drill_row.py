"""Measure one row of drill_table.py on the lab's login host: `drill_row.py LAB RUN WHAT`.

Prints the measurements and the hash of the weights as one line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import lab_power
from checkout import ROOT
from lab import Lab, wait_until

sys.path.insert(0, str(ROOT))

from rollcall.launch.runs import find
from rollcall.launch.runs.find import NoRunError
from rollcall.launch.scheduler import slurm
from rollcall.launch.scheduler.slurm import SlurmError
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.tools.drill import drill
from rollcall.tools.drill.faults import FAULTS, Fault, Target

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]
WORDS = ["digits", "device=cpu", "exact=true", "checkpoint.every=50", "log.every=1"]
STEPS = 400
"""Steps of most runs, enough to last some seconds longer than the drill needs to start."""


class Row(NamedTuple):
    """A failure to cause in a run.

    Attributes:
        fault: causes the failure in a run of this lab.
        options: further options of submit.py.
        steps: number of steps, enough that the run still trains when the failure happens.
    """

    fault: Callable[[Lab, Target], Fault]
    options: tuple[str, ...] = ()
    steps: int = STEPS


def plain(what: str, steps: int = STEPS) -> Row:
    """A drill of `rollcall drill`."""
    return Row(lambda _, target: FAULTS[what](target), steps=steps)


def on_one_node(what: str) -> Row:
    """A drill after which a user resumes on one node, as soon as the job has released its nodes."""

    def fault(_: Lab, target: Target) -> Fault:
        job = target.job.id
        released = (None, "PENDING", *slurm.FINAL)
        return FAULTS[what](target)._replace(
            is_free=lambda: slurm.state(job) in released,
            undo=lambda: _resume_on_one_node(target.run, STEPS),
        )

    return Row(fault, ("--max-restarts=0",))


def kill_host(number: int, *options: str) -> Row:
    """Cut the power of a host of the run."""

    def fault(lab: Lab, target: Target) -> Fault:
        host = target.attempt.hosts[number]
        return Fault(f"{host} loses its power", lambda: lab_power.off(lab, host))

    return Row(fault, options)


ROWS = {
    **{what: plain(what) for what in FAULTS},
    # These faults last 5 s, and Slurm checks time limits every 30 s.
    "full-disk": plain("full-disk", 900),
    "slow-network": plain("slow-network", 900),
    "time-limit": plain("time-limit", 1800),
    "kill-host (last)": kill_host(-1, "--spares=1"),
    "kill-host (first)": kill_host(0, "--spares=1"),
    "kill-host, then 2 ranks": kill_host(-1, "--nodes=1-2"),
    "kill-rank, then 2 ranks": on_one_node("kill-rank"),
    "preempt, then 2 ranks": on_one_node("preempt"),
}


def submit(run: RunDir, steps: int, *options: str) -> None:
    """Start or resume a run with 2 ranks per node."""
    place = ["--time=10", "--name", run.name, "--root", str(run.path.parent)]
    words = [*SUBMIT, "--nodes=2", *place, *options, *WORDS, f"train.steps={steps}"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def weights(run: RunDir) -> str:
    """Wait for a run to end; return the hash of its final weights, or "none" if it failed."""

    def ended() -> list[str]:
        return [line["weights"] for line in read_lines(run.events) if line.get("state") == "done"]

    def has_failed() -> bool:
        verdict = run.read_verdict()
        return verdict is not None and verdict.state == "failed"

    wait_until(lambda: bool(ended()) or has_failed(), 500, lambda: f"{run.name} does not end")
    return next(iter(ended()), "none")


def _resume_on_one_node(run: RunDir, steps: int) -> None:
    """Cancel the job that waits for two nodes, and resume on one."""
    cancel = [sys.executable, "-m", "launch", "cancel", str(run.path)]
    subprocess.run(cancel, cwd=ROOT, capture_output=True, check=False)  # fails if it has ended
    submit(run, steps, "--nodes=1", "--resume")


def main() -> None:
    """Submit a run, cause the failure, and print the measurements."""
    lab, path, row = Lab(sys.argv[1]), Path(sys.argv[2]), ROWS[sys.argv[3]]
    run = RunDir(path.parent, path.name)
    submit(run, row.steps, *row.options)
    wait_until(lambda: len(list(run.checkpoints.glob("step-*"))) > 1, 500, lambda: "no checkpoints")
    target = drill.await_training(run)
    measured = asdict(drill.measure(target, row.fault(lab, target)))
    ranks = find.attempts(run)[-1].ranks
    dead = [host for host in target.attempt.hosts if not lab_power.is_on(lab, host)]
    print(json.dumps({**measured, "ranks": ranks, "weights": weights(run)}))
    for host in dead:
        lab_power.on(lab, host)


if __name__ == "__main__":
    try:
        main()
    except (NoRunError, SlurmError, TimeoutError, subprocess.CalledProcessError) as error:
        sys.exit(f"drill_row: error: {error}")
