"""A few planted faults of tests/campaigns/first_causes.py, with real processes on three nodes."""

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from checkout import PACED, ROOT
from first_causes import LIMIT, SUBMIT, Case, answer, names_victim, problems
from lab import wait_until

from rollcall.launch.node import heartbeat
from rollcall.launch.runs import restarts
from rollcall.records.run_dir import RunDir

pytestmark = pytest.mark.long
CASES = (
    Case("rank", "stopped", "middle", 0, 2),
    Case("agent", "SIGKILL", "middle", 1),
    Case("supervisor", "SIGKILL", "middle", 2, 1, ("--max-restarts", "1")),
)
IN_TRAININGS = (
    Case("rank", "os._exit 75", "often", 0, 1, trains=True, once=True),
    Case("rank", "locked", "saved", 0, 1, trains=True, once=True),
    Case("data worker", "os._exit 75", "middle", 1, 1, trains=True),
    Case("writer", "signal SIGKILL", "saved", 1, 1, trains=True, once=True),
)


@pytest.mark.parametrize("case", IN_TRAININGS, ids=str)
def test_each_restart_names_the_rank_that_left_first(tmp_path: Path, case: Case) -> None:
    said = answer(case, tmp_path / "case")
    assert problems(case, said) == [], said


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_process_at_fault_is_named(tmp_path: Path, case: Case) -> None:
    said = answer(case, tmp_path / "case")
    assert problems(case, said) == [] and not names_victim(case, said.why), said


def test_a_run_whose_directory_is_removed_saves_and_stops(tmp_path: Path) -> None:
    words = ["--local", "--nodes=2", "--nproc-per-node=1", "--wait", "--name=a", "digits", PACED]
    words += [f"--root={tmp_path}", "device=cpu", "train.steps=1000000", "checkpoint.every=20"]
    submit = subprocess.Popen(
        [*SUBMIT, *words],
        cwd=ROOT,
        env={**os.environ, heartbeat.TIMEOUT: "6"},
        stderr=subprocess.PIPE,
        text=True,
    )
    run = RunDir(tmp_path, "a")
    try:
        wait_until(lambda: bool(run.read_events("checkpointed")), LIMIT, lambda: "no checkpoint")
        shutil.rmtree(run.path.rename(tmp_path / "removed"))  # nobody writes there meanwhile
        _, said = submit.communicate(timeout=LIMIT)
    finally:
        with suppress(psutil.NoSuchProcess):  # it has ended, as it should
            for process in psutil.Process(submit.pid).children(recursive=True):
                process.kill()
        submit.kill()
    step = restarts.saved_step(run)
    assert step and submit.returncode == 1
    assert said.endswith(
        f": the run directory {run.path} was removed; it now has only step {step}\n"
    )
