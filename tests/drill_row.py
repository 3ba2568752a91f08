"""One row of tests/drill_table.py, in the lab's login host: `drill_row.py LAB RUN WHAT`.

It prints what was measured and the hash of the weights as one line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import power
from lab import Lab, wait_until

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from launch import drill, runs, slurm  # noqa: E402
from launch.faults import FAULTS, Fault, Target  # noqa: E402
from launch.runs import NoRunError  # noqa: E402
from launch.slurm import SlurmError  # noqa: E402
from train.run import RunDir, read_lines  # noqa: E402

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]
WORDS = ["digits", "device=cpu", "exact=true", "checkpoint.every=50", "log.every=1"]
STEPS = 400
"""How long most runs are: some seconds longer than it takes to strike."""


class Row(NamedTuple):
    """What is done to a run.

    Attributes:
        fault: of the run, in this lab.
        options: of submit.py.
        steps: how long the run must be for the fault to find it.
    """

    fault: Callable[[Lab, Target], Fault]
    options: tuple[str, ...] = ()
    steps: int = STEPS


def plain(what: str, steps: int = STEPS) -> Row:
    """A drill, as `python -m launch drill` does it."""
    return Row(lambda _, target: FAULTS[what](target), steps=steps)


def on_one_node(what: str) -> Row:
    """A drill after which a person goes on with one node, as soon as the job has left its own."""

    def fault(_: Lab, target: Target) -> Fault:
        job = target.job.id
        over = (None, "PENDING", *slurm.FINAL)
        return FAULTS[what](target)._replace(
            is_free=lambda: slurm.state(job) in over, undo=lambda: _go_on(target.run, STEPS)
        )

    return Row(fault, ("--max-restarts=0",))


def kill_host(number: int, *options: str) -> Row:
    """A host of the run loses its power."""

    def fault(lab: Lab, target: Target) -> Fault:
        host = target.attempt.hosts[number]
        return Fault(f"{host} loses its power", lambda: power.off(lab, host))

    return Row(fault, options)


ROWS = {
    **{what: plain(what) for what in FAULTS},
    # What a run endures takes 5 s of it, and Slurm looks at time limits every 30 s.
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
    """Start a run of 2 ranks per node, or let it go on."""
    place = ["--time=10", "--name", run.name, "--root", str(run.path.parent)]
    words = [*SUBMIT, "--nodes=2", *place, *options, *WORDS, f"train.steps={steps}"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def weights(run: RunDir) -> str:
    """The hash of the weights that a run ends with."""

    def ended() -> list[str]:
        return [line["weights"] for line in read_lines(run.events) if line.get("state") == "done"]

    def has_failed() -> bool:
        verdict = run.read_verdict()
        return verdict is not None and verdict.state == "failed"

    wait_until(lambda: bool(ended()) or has_failed(), 180, lambda: f"{run.name} does not end")
    return next(iter(ended()), "none")


def _go_on(run: RunDir, steps: int) -> None:
    """As a person does it: end what waits for two nodes, and ask for one."""
    cancel = [sys.executable, "-m", "launch", "cancel", str(run.path)]
    subprocess.run(cancel, cwd=ROOT, capture_output=True, check=False)  # or it has ended
    submit(run, steps, "--nodes=1", "--resume")


def main() -> None:
    """Submit the run, strike, measure and print."""
    lab, path, row = Lab(sys.argv[1]), Path(sys.argv[2]), ROWS[sys.argv[3]]
    run = RunDir(path.parent, path.name)
    submit(run, row.steps, *row.options)
    wait_until(lambda: len(list(run.checkpoints.glob("step-*"))) > 1, 120, lambda: "no checkpoints")
    target = drill.await_training(run)
    measured = asdict(drill.measure(target, row.fault(lab, target)))
    ranks = runs.attempts(run)[-1].ranks
    dead = [host for host in target.attempt.hosts if not power.is_on(lab, host)]
    print(json.dumps({**measured, "ranks": ranks, "weights": weights(run)}))
    for host in dead:
        power.on(lab, host)


if __name__ == "__main__":
    try:
        main()
    except (NoRunError, SlurmError, TimeoutError, subprocess.CalledProcessError) as error:
        sys.exit(f"drill_row: error: {error}")
