"""When a run that has come down may start again, who is silent, and when time is short."""

import functools
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollcall.launch.node import monitor as asking
from rollcall.launch.node.identity import Node
from rollcall.launch.runs import restarts
from rollcall.records.attempt import AttemptEvent, RankFailure
from rollcall.records.job import JobRecord, RestartCause
from rollcall.records.run import JobEnd, LoggedStep
from rollcall.records.run_dir import RunDir
from rollcall.train.ranks import deadline
from rollcall.train.ranks.deadline import MARGIN, Deadline


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path, "it")
    run.job.mkdir(parents=True)
    return run


def come_down(run: RunDir, cause: RestartCause, job: str = "7") -> bool:
    """Whether the run may start again, and its note if so."""
    if restarts.in_vain(run, job, cause):
        return False
    restarts.note(run, job, cause)
    return True


def test_crashes_without_a_new_checkpoint_end_a_run(run: RunDir) -> None:
    assert [come_down(run, "crash") for _ in range(3)] == [True, True, False]
    assert come_down(run, "crash", job="8"), "another job begins anew"
    (run.checkpoints / "step-00000050").mkdir(parents=True)
    assert [come_down(run, "crash") for _ in range(3)] == [True, True, False]


def test_a_script_of_ones_own_that_saves_each_time_may_start_for_ever(run: RunDir) -> None:
    for number in range(5):
        assert come_down(run, "time limit"), number
        AttemptEvent(number, "7", "started", 1.0, hosts=["n1"], ranks=1).append(run.path)
        AttemptEvent(number, "7", "ended", 1.0, state="stopped").append(run.path)
    run.config.touch()
    assert [come_down(run, "time limit") for _ in range(3)] == [True, True, False], "a training"


def test_preemption_never_counts(run: RunDir) -> None:
    assert come_down(run, "crash")
    assert all(come_down(run, "preempted") for _ in range(5))
    assert come_down(run, "time limit")
    assert not come_down(run, "lost node")
    assert come_down(run, "preempted")


def test_a_lost_node_counts_once_with_the_crash_that_it_caused(run: RunDir) -> None:
    assert all(come_down(run, cause) for cause in ("crash", "lost node", "crash", "lost node"))
    assert not come_down(run, "crash")


def test_a_host_that_is_blamed_twice_is_left_out(run: RunDir) -> None:
    restarts.note(run, "7", "lost node", ["n1", "n2"])
    AttemptEvent(0, "7", "started", 1.0, hosts=["n1", "n2"], ranks=2).append(run.path)
    place = run.log(0, 1, 1).parent
    place.mkdir(parents=True)
    RankFailure(1.0, "n2", 137, "", 1, "agent").write(place)
    assert restarts.bad_hosts(run, "7") == ["n2"]


def test_the_end_of_the_job_is_asked_for_until_slurm_answers(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue, asked = tmp_path / "squeue", tmp_path / "asked"
    answer = "echo 'RUNNING|None|2030-01-01T00:00:00|N/A'"
    squeue.write_text(f"#!/bin/sh\n[ -e {asked} ] && {answer} || {{ touch {asked}; exit 1; }}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(asking, "SOON", 0.01)
    ours = asking.JobWatcher(run, Node(0, 1, ("n1",), "7", "7.0.0", None, 1))
    end = time.monotonic() + 20
    while (found := JobEnd.read(run.path)) is None and time.monotonic() < end:
        ours.update()
        time.sleep(0.01)
    assert found and found.end > 1.8e9


@pytest.mark.parametrize("options", [{}, {"comment": "project 7"}])
def test_progress_is_the_comment_of_a_job_that_has_none(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    told = tmp_path / "told"
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >{told}\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    JobRecord(str(run.path), 1, more={"options": options}).write(run.path)
    LoggedStep(5, 0.5, 10.0, 1.0).append(run.path)
    ours = asking.JobWatcher(run, Node(0, 1, ("n1",), "7", "7.0.0", None, 1))
    ours.update()
    if ours._comment is not None:
        ours._comment.wait(20)
    assert told.exists() == (not options)


def test_the_end_of_the_job_is_near_when_a_checkpoint_would_not_fit(tmp_path: Path) -> None:
    assert not Deadline(tmp_path).is_near(1e9), "nobody has spoken of an end"
    (tmp_path / "job").mkdir()
    JobEnd(time.time() + MARGIN + 60).write(tmp_path)
    assert not Deadline(tmp_path).is_near(20)
    ours = Deadline(tmp_path)
    assert not ours.is_near(40), "the job may have been suspended: the end may have moved"
    JobEnd(time.time() + 3600).write(tmp_path)
    time.sleep(0.1)
    assert not ours.is_near(40)
    JobEnd(time.time() + MARGIN).write(tmp_path)
    end = time.monotonic() + 20
    while not ours.is_near(40) and time.monotonic() < end:
        time.sleep(0.1)
    assert ours.has_come


@pytest.mark.parametrize("told_before", [True, False])
@pytest.mark.parametrize(("left", "waited"), [(60, 50), (8, 4), (0.5, None), (-5, None)])
def test_the_last_save_has_what_is_left_but_for_the_verdict(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    left: float,
    waited: float | None,
    told_before: bool,
) -> None:
    now = 1000.0
    clock = SimpleNamespace(time=lambda: now, monotonic=lambda: now)
    monkeypatch.setattr(deadline, "time", clock)
    monkeypatch.setattr(deadline, "LOOK", 0.0)
    told = Deadline(tmp_path)
    (tmp_path / "job").mkdir()
    write = functools.partial(JobEnd(now + left).write, tmp_path)
    if told_before:
        write()
    told.begin_last_save()
    write()
    now += 0.1
    assert not told.is_late()
    now += (waited or 500) - 0.2
    assert not told.is_late()
    now += 0.2
    assert told.is_late() == (waited is not None)
