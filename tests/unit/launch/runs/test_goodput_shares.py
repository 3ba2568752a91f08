"""The shares of a run's time, from records whose times are known."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollcall.launch.runs import states
from rollcall.launch.runs.goodput import goodput
from rollcall.records.attempt import AttemptEvent
from rollcall.records.job import Restart, Submission
from rollcall.records.run import ForgottenStep, LoggedStep, Verdict
from rollcall.records.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path, "it")
    run.job.mkdir(parents=True)
    return run


def event(run: RunDir, time: float, name: str, **fields: Any) -> None:
    with run.events.open("a") as file:
        file.write(json.dumps({"time": time, "event": name, **fields}) + "\n")


def attempt(run: RunDir, number: int, start: float, end: float | None, state: str = "") -> None:
    AttemptEvent(number, "7", "started", start, hosts=["n1"], ranks=1).append(run.path)
    event(run, start + 1, "started")
    if end is not None:
        AttemptEvent(number, "7", "ended", end, state=state).append(run.path)


def step(run: RunDir, number: int, time: float, wait: float = 0.0, kept: bool = True) -> None:
    kind = LoggedStep if kept else ForgottenStep
    kind(number, 0.5, 1.0, time, wait).append(run.path)


def saved(run: RunDir, number: int) -> None:
    (run.checkpoints / f"step-{number:08d}").mkdir(parents=True)


def of(run: RunDir) -> tuple[dict[str, float], int]:
    found = goodput(run, states.look([run])[0][0])
    assert found is not None
    assert sum(found.shares.values()) == pytest.approx(found.wall)
    shares = {name: pytest.approx(taken) for name, taken in found.shares.items() if taken > 1e-6}
    return shares, found.repeated_steps  # type: ignore[return-value]


def test_a_run_that_waits_crashes_is_queued_again_and_ends(run: RunDir) -> None:
    Submission("7", 0.0).append(run.path)
    attempt(run, 0, 100.0, 180.0, "failed")
    event(run, 110.0, "first_step", step=1)
    step(run, 11, 130.0, wait=0.25)  # 10 steps in 20 s, of which 5 s are waits
    event(run, 131.0, "checkpointed", step=11, seconds=0.5, stall=0.0)
    event(run, 142.0, "checkpointed", step=15, seconds=10.0, stall=2.0)
    step(run, 21, 152.0, kept=False)
    Restart(181.0, "7", "lost node", 11, is_queued=True).append(run.path)
    attempt(run, 1, 300.0, 340.0, "finished")
    event(run, 305.0, "first_step", step=12)
    step(run, 31, 324.0)  # 19 steps, of which 9 were done before
    event(run, 330.0, "evaluated", step=31, seconds=4.0)
    event(run, 332.0, "checkpointed", step=31, seconds=1.5, stall=0.1)
    event(run, 333.0, "finished", step=31, state="done")
    Verdict("done", 31, "").write(run.path)
    first, second = 15.0 + 20.0, 10.0
    assert of(run) == (
        {
            "productive": first + second + 2.0,
            "queue": 100.0 + (300.0 - 181.0) + 1.0,
            "startup": 10.0 + 5.0,
            "data wait": 5.0,
            "checkpoint": 2.0 + 1.5,
            "evaluation": 4.0,
            "repeated": 9.0,
            "lost": 180.0 - 152.0,
            "other": 1.5 + 7.0,
        },
        10,
    )


def test_work_that_nobody_saved_is_lost(run: RunDir) -> None:
    attempt(run, 0, 100.0, 200.0, "failed")
    event(run, 110.0, "first_step", step=1)
    step(run, 41, 150.0)
    saved(run, 11)
    Verdict("failed", 41, "").write(run.path)
    assert of(run) == ({"productive": 10.0, "startup": 10.0, "lost": 30.0 + 50.0}, 0)


def test_a_rollback_repeats_and_a_run_without_a_launcher_starts_again(run: RunDir) -> None:
    event(run, 0.0, "started")
    event(run, 2.0, "first_step", step=1)
    step(run, 11, 12.0, kept=False)
    event(run, 13.0, "rolled_back", step=6)
    step(run, 16, 23.0)
    event(run, 24.0, "signalled", step=17)
    event(run, 25.0, "finished", step=17, state="requeue")
    event(run, 35.0, "started")
    event(run, 36.0, "first_step", step=18)
    step(run, 18, 36.5)
    event(run, 37.0, "evaluated", step="17", seconds=None)  # damaged
    event(run, 37.0, "checkpointed", step=10**400, seconds=0.0, stall=0.0)
    event(run, 40.0, "finished", step=21, state="done")
    Verdict("done", 21, "").write(run.path)
    parts = {"productive": 10 + 5 + 1 + 4.0, "repeated": 5.0, "lost": 1.0}
    assert of(run) == ({**parts, "startup": 3.0, "restart": 10.0, "other": 1.0}, 5)


def test_a_program_of_the_user_that_logs_steps(run: RunDir) -> None:
    AttemptEvent(0, "7", "started", 100.0, hosts=["n1"], ranks=1).append(run.path)
    step(run, 10, 110.0)
    step(run, 40, 140.0, wait=0.1)
    AttemptEvent(0, "7", "ended", 145.0, state="finished").append(run.path)
    Verdict("done", 40, "").write(run.path)
    shares = {"startup": 10.0, "productive": 27.0, "data wait": 3.0, "other": 5.0}
    assert of(run) == (shares, 0)


def test_a_run_that_has_never_started_has_no_goodput(run: RunDir) -> None:
    assert goodput(run, states.look([run])[0][0]) is None
