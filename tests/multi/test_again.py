"""A failed or finished run is started again: with its own code or with new code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rollcall.launch.runs import find
from rollcall.run_dir import RunDir

SUBMIT = [sys.executable, str(Path(__file__).parents[2] / "launch" / "submit.py")]


def test_a_failed_run_goes_on_with_the_code_it_has_or_with_new_code(tmp_path: Path) -> None:
    def submitted(*options: str) -> subprocess.CompletedProcess[str]:
        words = ["--local", "--wait", "--nproc-per-node=1", "--name=a", *options, "--", "fit.py"]
        return subprocess.run([*SUBMIT, *words], cwd=tmp_path, capture_output=True, text=True)

    (tmp_path / "fit.py").write_text("raise SystemExit(3)")
    assert submitted().returncode == 3
    (tmp_path / "fit.py").write_text("print('mended')")
    refused = submitted()
    assert (refused.returncode, "add --resume" in refused.stderr) == (2, True)
    kept = submitted("--resume")
    assert (kept.returncode, "with the code that it has" in kept.stderr) == (3, True)
    renewed = submitted("--resume", "--new-code")
    assert (renewed.returncode, "mended" in renewed.stdout) == (0, True), renewed.stderr
    finished = submitted()
    assert (finished.returncode, "is finished" in finished.stderr) == (0, True)
    assert submitted("--resume").returncode == 0
    states = [attempt.state for attempt in find.attempts(RunDir(tmp_path / "runs", "a"))]
    assert states == ["failed", "failed", "finished", "finished"]


def supervised(place: Path, output: int) -> str | None:
    """How a training of one step ends whose directory is this, and whose output goes there."""
    words = ["supervise", f"--run-dir={place}", "--nproc-per-node=1", "--", "-m", "train", "digits"]
    done = subprocess.run(
        [sys.executable, "-m", "launch", *words, "train.steps=1", "checkpoint.every=null"],
        cwd=Path(SUBMIT[1]).parents[1],
        stdout=output,
        stderr=subprocess.PIPE,
    )
    verdict = RunDir(place.parent, place.name).read_verdict()
    return verdict.state if verdict and done.returncode == 0 else done.stderr.decode()


def test_a_run_needs_nobody_who_reads_its_output(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert supervised(tmp_path / "a", writer) == "done"
    os.close(writer)


def test_a_run_goes_where_it_is_sent_though_there_is_no_room_for_its_output(tmp_path: Path) -> None:
    """And whatever YAML would read in the words for that place."""
    with Path("/dev/full").open("w") as full:
        assert supervised(tmp_path / "my runs: all #1" / "007", full.fileno()) == "done"
