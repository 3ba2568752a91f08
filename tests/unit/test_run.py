from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from train import run
from train.deadline import FILE, Deadline
from train.run import RunDir, Verdict, read_lines, write_atomic


def test_a_file_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "name")
    run_dir.create()
    run_dir.record("started")
    with run_dir.events.open("a") as file:
        file.write('{"event": "resu')
    assert [line["event"] for line in read_lines(run_dir.events)] == ["started"]
    run_dir.record("resumed", step=3)
    assert [line["event"] for line in read_lines(run_dir.events)] == ["started", "resumed"]


def test_verdict_reads_back(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "name")
    run_dir.create()
    assert run_dir.read_verdict() is None
    run_dir.conclude(Verdict("done", 7, "7 steps trained"))
    assert run_dir.read_verdict() == Verdict("done", 7, "7 steps trained")
    assert run_dir.path.stat().st_mode & 0o077 == 0


def test_a_requeued_job_finds_its_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert run.default_name("digits") == "digits-17"


def test_lines_wait_for_a_disk_that_takes_none(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "name")
    run_dir.create()
    run_dir.events.mkdir()  # what can be opened no more than a file on a full disk can be written
    run_dir.record("started")
    run_dir.record("resumed", step=3)
    run_dir.events.rmdir()
    run_dir.record("finished")
    assert [line["event"] for line in read_lines(run_dir.events)] == [
        "started",
        "resumed",
        "finished",
    ]


def test_the_end_of_an_earlier_job_is_not_ours(tmp_path: Path) -> None:
    """As of a run that a person continues outside of Slurm after a time limit."""
    for end, is_near in ((time.time() - 3600, False), (time.time() + 5, True)):
        (tmp_path / FILE).write_text(json.dumps({"end": end}))
        assert Deadline(tmp_path).is_near(0) == is_near
