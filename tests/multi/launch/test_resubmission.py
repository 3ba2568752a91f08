"""A failed or finished run is started again: with its own code or with new code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout import ROOT

from rollcall.launch.runs import find
from rollcall.launch.submission import layers
from rollcall.launch.submission.plan import plan
from rollcall.records.run_dir import RunDir

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]


LEAVES_RESULTS = """
import os, pathlib
print("found", sorted(map(str, pathlib.Path().glob("*.pt"))))
pathlib.Path(os.environ.get("RANK", "by-hand") + ".pt").touch()
pathlib.Path(os.environ.get("ROLLCALL_RUN_DIR", "."), "curve.csv").touch()
"""


def submitter(place: Path, python: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    def submitted(*options: str) -> subprocess.CompletedProcess[str]:
        words = ["--local", "--wait", "--nproc-per-node=1", "--name=a", python, *options]
        words += ["--", "fit.py"]
        return subprocess.run([*SUBMIT, *words], cwd=place, capture_output=True, text=True)

    return submitted


@pytest.mark.long
def test_a_run_starts_without_results_of_others_and_keeps_its_own(
    tmp_path: Path, bare: str
) -> None:
    (tmp_path / "fit.py").write_text(LEAVES_RESULTS)
    subprocess.run([sys.executable, "fit.py"], cwd=tmp_path, check=True)
    submitted = submitter(tmp_path, bare)
    first = submitted()
    assert "found []" in first.stdout, first.stderr
    assert "results of earlier runs stay behind: by-hand.pt" in first.stderr
    assert (tmp_path / "runs" / "a" / "curve.csv").exists()
    assert "found ['0.pt']" in submitted("--resume").stdout
    assert "found ['0.pt']" in submitted("--resume", "--new-code").stdout


@pytest.mark.long
def test_a_failed_run_goes_on_with_the_code_it_has_or_with_new_code(
    tmp_path: Path, bare: str
) -> None:
    submitted = submitter(tmp_path, bare)
    (tmp_path / "fit.py").write_text("raise SystemExit(3)")
    failed = submitted("--resume")  # nothing is there yet
    assert failed.returncode == 3 and "there was no run a to resume" in failed.stderr
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


def test_another_request_under_a_taken_name_is_refused_and_told(tmp_path: Path, bare: str) -> None:
    """A loop over arguments would believe that each of them ran."""

    def submitted(*words: str, name: str = "a") -> tuple[int, str]:
        options = ["--local", "--wait", "--nproc-per-node=1", f"--name={name}", bare]
        done = subprocess.run(
            [*SUBMIT, *options, *words], cwd=tmp_path, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr

    script, data = tmp_path / "fit.py", tmp_path / "rows.csv"
    script.write_text("open('rows.csv', 'a').write('3')")
    data.write_text("12")
    assert submitted("--", "fit.py", "3")[0] == 0
    data.write_text("1")  # no code
    code, text = submitted("--", "fit.py", "3")
    assert (code, "is finished" in text) == (0, True), text
    code, text = submitted("--", "fit.py", "4")
    assert (code, "this request differs: 4 instead of 3; choose another --name" in text) == (
        2,
        True,
    )
    script.write_text("pass")
    code, text = submitted("--", "fit.py", "3")
    assert (code, "this request differs: fit.py changed since then" in text) == (2, True), text
    for words in (["3"], ["4"], ["3"]):
        assert submitted("--", "fit.py", *words, name="auto")[0] == 0
    assert len([path for path in (tmp_path / "runs").iterdir() if path.name[:4] == "fit-"]) == 2


def test_a_name_from_the_request_is_that_of_its_keys(tmp_path: Path) -> None:
    def name(*words: str) -> str:
        line, setup = layers.read(["--local", f"--root={tmp_path}", "--name=auto", *words])
        return plan(line, words, setup).run.name

    one = name("digits", "optim.lr=0.1")
    assert one.startswith("digits-") and len(one) == len("digits-") + 8
    assert one == name("--nodes=2", "optim.lr=1e-1", "seed=0")
    assert one != name("digits", "optim.lr=0.2")


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


@pytest.mark.long
def test_a_run_needs_nobody_who_reads_its_output(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert supervised(tmp_path / "a", writer) == "done"
    os.close(writer)


@pytest.mark.long
def test_a_run_goes_where_it_is_sent_though_there_is_no_room_for_its_output(tmp_path: Path) -> None:
    """And whatever YAML would read in the words for that place."""
    with Path("/dev/full").open("w") as full:
        assert supervised(tmp_path / "my runs: all #1" / "007", full.fileno()) == "done"
