from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollcall.config import parse
from rollcall.records import run_dir
from rollcall.records.run import JobEnd
from rollcall.records.run_dir import RunDir
from rollcall.system.files import write_atomic
from rollcall.train.ranks import deadline
from rollcall.train.ranks.deadline import Deadline


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
    monkeypatch.undo()
    write_atomic(path, os.fsdecode(b"of caf\xe9"))  # names of files are bytes
    assert path.read_bytes() == b"of caf\xe9"


def test_a_requeued_job_finds_its_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert run_dir.default_name("digits") == "digits-17"


@pytest.mark.parametrize("recipe", ["my recipe", "_x", "é", "a" * 200])
def test_the_name_of_a_file_becomes_a_name_that_a_run_may_have(recipe: str) -> None:
    name = run_dir.default_name(recipe)
    assert parse([f"run.name={name}"])[1].run.name == name


def test_lines_wait_for_a_disk_that_takes_none(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "name")
    run_dir.create()
    run_dir.path.rename(tmp_path / "away")  # as little can be written as on a full disk
    run_dir.record("started")
    run_dir.record("resumed", step=3)
    (tmp_path / "away").rename(run_dir.path)
    run_dir.record("finished")
    assert [line["event"] for line in run_dir.read_events()] == [
        "started",
        "resumed",
        "finished",
    ]


def test_the_end_of_an_earlier_job_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a run that a person continues outside of Slurm after a time limit."""
    (tmp_path / "job").mkdir()
    monkeypatch.setattr(deadline, "SURE", 0.0)
    for end, is_near in ((time.time() - 3600, False), (time.time() + 5, True)):
        JobEnd(end).write(tmp_path)
        ours = Deadline(tmp_path)
        assert (ours.is_near(0) or ours.is_near(0)) == is_near


def test_a_copy_of_the_output_has_the_lines_that_stay(tmp_path: Path) -> None:
    """A progress bar that is overwritten leaves no line in the log."""
    code = (
        "import pathlib, sys; from rollcall.system import process; process.outlast_full_disks(); "
        "process.keep_output(pathlib.Path(sys.argv[1])); "
        "print('bar 1', end='\\r\\x1b[2K', flush=True); print('one', flush=True); "
        "print('bar 2', end='\\r', flush=True); print('two')"
    )
    log = tmp_path / "logs" / "rank-0.log"
    subprocess.run([sys.executable, "-c", code, str(log)], check=True, capture_output=True)
    assert log.read_text() == "one\ntwo\n"
    log.unlink()
    ours, theirs = os.pipe()
    os.close(ours)  # as if the terminal were gone
    subprocess.run([sys.executable, "-c", code, str(log)], check=True, stdout=theirs)
    os.close(theirs)
    assert log.read_text() == "one\ntwo\n"
