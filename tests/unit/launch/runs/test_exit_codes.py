"""The exit code of every end of a run, by every way to start it.

Stand-ins for Slurm, ssh and the supervisors leave the records of a run that ended; what starts the
run and waits for it is real.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from checkout import ROOT
from disks import mounted, needs_root

from rollcall.launch.remote import ssh
from rollcall.launch.runs import exit_code
from rollcall.launch.runs.exit_code import CANCELLED
from rollcall.launch.submission import layers, start
from rollcall.launch.submission.plan import plan
from rollcall.records.attempt import AttemptEvent, RankEnd, RankFailure
from rollcall.records.job import Cancellation
from rollcall.records.run import State, Verdict
from rollcall.records.run_dir import RunDir

CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer"
SAVED = os.EX_TEMPFAIL


class End(NamedTuple):
    """The end of a run of two ranks on two nodes."""

    state: str | None  # of the newest attempt; None if its end was not written
    code: int | None  # of the head's part
    verdict: State | None
    first: int | None = None  # how the rank ended that left first
    is_cancelled: bool = False


ENDS = {
    "done": (End("finished", 0, "done"), 0),
    "done, and the disk is full": (End("finished", 0, None), 0),
    "done, and then cancelled": (End("finished", 0, "done", is_cancelled=True), 0),
    "done, and the head was killed": (End(None, None, "done"), 0),
    "a rank left with 0": (End("failed", 1, "failed", 0), 1),
    "a rank left with 75": (End("failed", 1, "failed", 75), 1),
    "a rank left with 0, and there is no verdict": (End("failed", 1, None, 0), 1),
    "a rank left with 3": (End("failed", 1, "failed", 3), 3),
    "a rank was killed": (End("failed", 1, "failed", 137), 137),
    "refused": (End("failed", 2, "failed", 2), 2),
    "failed, and no rank says why": (End("failed", 1, None), 1),
    "failed, and the verdict is an earlier one": (End("failed", 1, "requeue", 3), 3),
    "saved, and may not start again": (End("stopped", SAVED, "failed"), 1),
    "saved": (End("stopped", SAVED, "requeue"), SAVED),
    "stopped": (End("stopped", SAVED, "stopped"), SAVED),
    "stopped, and the disk is full": (End("stopped", SAVED, None), SAVED),
    "cancelled": (End("stopped", SAVED, "requeue", is_cancelled=True), CANCELLED),
    "cancelled, and killed": (End("failed", 143, None, 143, True), CANCELLED),
    "the head was killed": (End(None, None, None), 1),
}


def write(run: RunDir, job: str, end: End) -> None:
    """Write the records of a run that ended like this."""
    started = AttemptEvent(0, job, "started", 100.0, hosts=["n0", "n1"], ranks=2)
    started.append(run.path)
    if end.state is not None:
        ended = AttemptEvent(0, job, "ended", 200.0, state=end.state, exit_code=end.code)
        ended.append(run.path)
    if end.verdict is not None:
        Verdict(end.verdict, 5, "its reason").write(run.path)
    if end.is_cancelled:
        Cancellation([job], 150.0).append(run.path)
    for rank, code in ((1, end.first), (0, 1)) if end.first is not None else ():
        logs = run.log(0, rank, rank).parent
        logs.mkdir(parents=True)
        assert code is not None
        RankEnd(200.0 - rank, rank, code).append(logs)
        if code not in (0, SAVED):
            error = "" if rank else CLOSED
            RankFailure(200.0 - rank, f"n{rank}", code, error, rank).write(logs, who=f"rank-{rank}")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run's directory to be, where this test stands; Slurm's commands are not there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin:/usr/bin")
    (tmp_path / "bin").mkdir()
    (tmp_path / "fit.py").touch()
    return RunDir(tmp_path / "runs", "a")


def fake(name: str, body: str) -> Path:
    path = Path("bin", name).absolute()
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("job", ["7", "7_1", "4711"])
@pytest.mark.parametrize("how", ENDS)
def test_each_end_has_one_exit_code(run: RunDir, how: str, job: str) -> None:
    end, code = ENDS[how]
    run.job.mkdir(parents=True)
    write(run, job, end)
    if job == "4711":  # on this machine
        (run.job / "4711_0_log.out").touch()
    assert exit_code.of_run(run, ["6", job]) == code
    expected = 0 if end.verdict == "done" else 1
    assert exit_code.of_run(run, [job], before=1) == (CANCELLED if code == CANCELLED else expected)
    if code == SAVED and job == "7":
        fake("squeue", "echo '7|7|CANCELLED|None|N/A|2'")
        assert exit_code.of_run(run, [job]) == CANCELLED


WAYS = {"local": ["--local"], "Slurm": [], "chain": ["--chain=2"], "allocation": []}
"""Ways to start a run, by `submit`'s options."""


@pytest.mark.parametrize("way", [*WAYS, "array", "ssh"])
@pytest.mark.parametrize(
    "how", ["done", "a rank left with 0", "a rank left with 3", "saved", "cancelled"]
)
def test_every_way_to_start_a_run_ends_with_it(
    run: RunDir, way: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, code = ENDS[how]
    before = RunDir("before", "a")  # `end` copies it into the run's directory
    before.job.mkdir(parents=True)
    target = run.path / "task-1" if way == "array" else run.path
    copy = f"cp -r {before.path}/. {target}"
    if way == "ssh":
        fake("ssh", 'shift; cd() { :; }; export -f cd; exec bash -c "$*"')
        command = fake("there", f"exit {code}")
        words = ["submit", "--wait", "--host=h", f"--host-command={command}", "fit.py"]
        monkeypatch.setattr(ssh, "_copy", lambda *_: None)
        assert ssh.main(words) == code
        return
    command = fake("supervise", f"sed -i s/JOB/$SUBMITIT_LOCAL_JOB_ID/ {before.job}/*; {copy}")
    write(before, "JOB" if way in ("local", "array") else "7", end)
    if way == "array":
        words = ["array", f"--run-dir={run.path}", "--tasks=1", "--", str(command)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        array = subprocess.run([sys.executable, "-m", "rollcall", *words], env=env, check=False)
        assert array.returncode == (code != 0)
        return
    assert submit(way, str(command), copy, "--wait") == code


def submit(way: str, command: str, copy: str, *options: str) -> int:
    """Start a run in one of the WAYS; a supervisor, or Slurm, copies the records of its end."""
    fake("sinfo", "echo 'main*|2|1-infinite|infinite|up|8|16000|(null)|UNLIMITED'")
    fake("squeue", "")
    fake("sbatch", f"[[ $1 = --test-only ]] || {{ {copy}; echo Submitted batch job 7; }}")
    fake("srun", copy)
    words = [*WAYS[way], *options, "--name=a", f"--python={sys.executable}", "--", "fit.py"]
    line, setup = layers.read(words)
    submission = plan(line, words, setup)
    more = {"local": {"command": (command,)}, "allocation": {"allocation": "7"}}.get(way, {})
    submission = replace(submission, job=replace(submission.job, **more))  # type: ignore[arg-type]
    return start.start(submission, local=way == "local")


@pytest.mark.parametrize("way", ["local", "Slurm", "chain"])
def test_who_does_not_wait_is_told_that_the_run_was_submitted(run: RunDir, way: str) -> None:
    """However it ends; in an allocation and an array's task, submitting is waiting."""
    before = RunDir("before", "a")
    before.job.mkdir(parents=True)
    write(before, "7", ENDS["a rank left with 3"][0])
    command = fake("supervise", "true")
    assert submit(way, str(command), f"cp -r {before.path}/. {run.path}") == 0


def test_a_run_that_its_head_left_without_a_word_names_the_cause_and_can_go_on(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run.job.mkdir(parents=True)
    write(run, "7", End(None, None, None, 3))
    assert start._exit_code(run, ["7"]) == 3
    assert run.read_verdict() is None  # a failed run would not be submitted again
    assert "rank 1 on n1 (node 1) ended with exit code 3" in capsys.readouterr().err


def test_a_run_that_is_done_in_a_directory_that_was_removed_says_so(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.checkpoints / "step-00000060").mkdir(parents=True)  # by the training, which went on
    run.conclude(Verdict("done", 60, "60 steps trained"))
    assert start._exit_code(run, ["7"]) == 0
    text = "rollcall: the run is done, without its records: the run directory "
    said = capsys.readouterr().err
    assert said == f"{text}{run.path} was removed; it now has only step 60\n"


@needs_root
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("full", "nothing can be written to {}: No space left on device"),
        ("read-only", "nothing can be written to {}: Read-only file system"),
        ("gone", "the run directory {} is gone"),
    ],
)
def test_a_run_directory_that_takes_no_files_is_named_at_the_end(
    run: RunDir, what: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with mounted(run.path, "tmpfs", "200k"):
        run.job.mkdir()
        write(run, "7", End(None, None, None))
        if what == "full":
            with suppress(OSError), (run.path / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1000))
        if what == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(run.path)], check=True)
        if what != "gone":
            assert start._exit_code(run, ["7"]) == 1
    if what == "gone":
        run.path.rmdir()
        assert start._exit_code(run, ["7"]) == 1
    text = "rollcall: error: job 7 ended before the run ended: " + reason.format(run.path)
    assert capsys.readouterr().err == f"{text}\n"
