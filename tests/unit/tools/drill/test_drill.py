"""A drill takes back what it has done, also where it is interrupted."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest
from checkout import ROOT

from rollcall.cli import program as launch
from rollcall.launch.runs import states
from rollcall.launch.runs.find import SubmittedJob
from rollcall.launch.runs.states import Condition
from rollcall.launch.scheduler.slurm import SlurmError
from rollcall.records.attempt import AttemptRecord
from rollcall.records.run_dir import RunDir
from rollcall.tools.drill import drill
from rollcall.tools.drill.faults import FAULTS, Fault, Target

INJECT = """
import sys
from rollcall.tools.drill import on_node
on_node.ranks_of = lambda place: {int(sys.argv[1]): 0}
sys.exit(on_node.main(["full-disk", sys.argv[2], "0"]))
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A run that trains, as far as anybody can tell."""
    run = RunDir(tmp_path, "it")
    run.job.mkdir(parents=True)
    monkeypatch.setattr(states, "look", lambda _: ([Condition("running")], ""))
    target = Target(run, SubmittedJob("7", False), AttemptRecord(0, "7", ["n1"], 2, 1.0))
    monkeypatch.setattr(drill, "await_training", lambda _: target)
    return target


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def test_an_interrupt_at_the_question_does_nothing(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck: list[int] = []
    fault = Fault("it", lambda: struck.append(1))
    monkeypatch.setitem(FAULTS, "kill-rank", lambda _: fault)
    monkeypatch.setattr("builtins.input", interrupt)
    words = ["drill", "it", "kill-rank", "--root", str(target.run.path.parent)]
    assert (launch.main(words), struck) == (130, [])


def test_an_interrupt_while_it_measures_takes_the_fault_back(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    undone: list[int] = []
    monkeypatch.setattr(time, "sleep", interrupt)
    fault = Fault("it", lambda: None, lambda: False, lambda: undone.append(1))
    with pytest.raises(KeyboardInterrupt):
        drill.measure(target, fault)
    assert undone == [1]


def test_what_cannot_be_taken_back_at_first_is_later(
    target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def undo() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise SlurmError("scontrol refuses")

    monkeypatch.setattr(drill, "QUERY_INTERVAL", 0.0)
    monkeypatch.setattr(drill, "PATIENCE", 2.0)
    measured = drill.measure(target, Fault("it", lambda: None, lambda: True, undo))
    assert (len(calls), measured.free is not None) == (3, True)
    calls.clear()
    monkeypatch.setattr(drill, "PATIENCE", 0.0)
    drill.measure(target, Fault("its limit", lambda: None, lambda: True, undo))
    assert "could not undo this, because scontrol refuses: its limit" in capsys.readouterr().err


def test_a_disk_is_full_no_longer_than_said_though_the_job_ends(tmp_path: Path) -> None:
    (tmp_path / "node-0").mkdir()
    with subprocess.Popen(["sleep", "60"]) as victim:
        before = resource.prlimit(victim.pid, resource.RLIMIT_FSIZE)
        command = [sys.executable, "-c", INJECT, str(victim.pid), str(tmp_path)]
        with subprocess.Popen(command, cwd=ROOT) as injector:
            end = time.monotonic() + 500
            while resource.prlimit(victim.pid, resource.RLIMIT_FSIZE)[0] != 0:
                assert time.monotonic() < end and injector.poll() is None
                time.sleep(0.01)
            injector.send_signal(signal.SIGTERM)
        after = resource.prlimit(victim.pid, resource.RLIMIT_FSIZE)
        victim.kill()
    assert after == before
