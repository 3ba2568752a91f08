"""The batch process of a job is killed or stopped alone, and a job is suspended as a whole."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from checkout import PACED, ROOT
from lab import BOTH_TRACKERS, Lab, wait_until

from rollcall.launch.runs import find
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]
SLEEPS = "import pathlib, sys, time\nprint('begun', flush=True)\nend = pathlib.Path(sys.argv[1])\n"
SLEEPS += "while not end.exists():\n    time.sleep(0.1)\n"
WORDS = ["digits", "device=cpu", "exact=true", "log.every=1", "data.global_batch=64"]
ENDLESS = [*WORDS, "train.steps=1000000", "checkpoint.every=null", PACED]


def submit(lab: Lab, run: RunDir, *words: str, cwd: Path = ROOT, gate: str = "0:0:") -> str:
    """Submit a run on two nodes; return the id of its job."""
    place = ["--nodes=2", "--nproc-per-node=1", "--name", run.name, "--root", str(run.path.parent)]
    done = lab.exec("login", *SUBMIT, *place, *words, cwd=cwd, env={"GATE": gate})
    assert done.returncode == 0, done.stdout + done.stderr
    return str(next(read_lines(run.job / "submissions.jsonl"))["job"])


def says(lab: Lab, run: RunDir, command: str) -> str:
    """Return what a command of the launcher prints about a run."""
    python = [sys.executable, "-m", "launch", command, "--root", str(run.path.parent), run.name]
    return lab.output("login", *python)


def batch_of(run: RunDir) -> psutil.Process:
    """Find the batch process of a run."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "batch" in words and f"--run-dir={run.path}" in words:
            return process
    raise AssertionError("there is no batch process")


def stop_guard_of_srun(batch: psutil.Process) -> None:
    """Stop the child of srun that kills the step when srun is killed.

    Slurm kills both with the batch process. Now and then that child still gets to act, and nothing
    is left that could requeue the job.
    """
    (srun,) = [child for child in batch.children() if child.name() == "srun"]
    for guard in srun.children():
        guard.suspend()


def count(run: RunDir, event: str) -> int:
    return len(run.read_events(event))


@pytest.fixture
def run(lab: Lab, tmp_path: Path) -> Iterator[RunDir]:
    run = RunDir(tmp_path / "runs", "it")
    yield run
    for job in find.jobs(run):
        lab.exec("login", "scancel", job.id)
        lab.wait_job(job.id)


@BOTH_TRACKERS
def test_a_job_whose_batch_process_is_killed_comes_back(lab: Lab, run: RunDir) -> None:
    job = submit(lab, run, *ENDLESS)
    wait_until(lambda: count(run, "first_step") == 1, 500, lambda: "there is no step")
    batch = batch_of(run)
    stop_guard_of_srun(batch)
    batch.kill()
    wait_until(lambda: count(run, "first_step") == 2, 500, lambda: says(lab, run, "why"))
    (resumed,) = run.read_events("resumed")
    assert resumed["step"] > 0, "it saved when it was asked to stop"
    restarts = [line["cause"] for line in read_lines(run.job / "restarts.jsonl")]
    assert (lab.job(job, "Restarts"), restarts) == ("1", ["lost batch process"])


def test_a_job_that_cannot_be_requeued_tells_what_was_killed(lab: Lab, run: RunDir) -> None:
    job = submit(lab, run, "--no-requeue", *ENDLESS)
    wait_until(lambda: count(run, "first_step") == 1, 500, lambda: "there is no step")
    batch_of(run).kill()
    assert lab.wait_job(job) == "FAILED"
    shown = says(lab, run, "why")
    assert "requeue (" not in shown, shown
    assert "the batch process on its first node was killed by SIGKILL" in shown, shown
    assert says(lab, run, "status").splitlines()[1].split()[1] in ("stopped", "failed")


def test_a_batch_process_that_was_stopped_keeps_no_nodes(
    lab: Lab, run: RunDir, tmp_path: Path
) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    job = submit(lab, run, "--", "sleeps.py", str(tmp_path / "end"), cwd=tmp_path)
    wait_until(lambda: run.log(0, 1, 1).exists(), 500, lambda: "it does not begin")
    batch_of(run).send_signal(signal.SIGSTOP)
    (tmp_path / "end").touch()
    assert lab.wait_job(job) == "COMPLETED"
    assert says(lab, run, "why").startswith("run it has not failed: done")


def test_a_step_that_lost_its_srun_ends_before_the_next_one_starts(lab: Lab, run: RunDir) -> None:
    """Its ranks save, because Slurm asks them to stop: no step is repeated."""
    job = submit(lab, run, *ENDLESS)
    wait_until(lambda: count(run, "first_step") == 1, 500, lambda: "there is no step")
    batch = batch_of(run)
    stop_guard_of_srun(batch)
    for srun in batch.children():
        srun.kill()
    wait_until(lambda: count(run, "first_step") == 2, 500, lambda: says(lab, run, "why"))
    events = [(line["attempt"], line["event"]) for line in read_lines(run.job / "attempts.jsonl")]
    assert events == [(0, "started"), (0, "ended"), (1, "started")]
    causes = [line["cause"] for line in read_lines(run.job / "restarts.jsonl")]
    assert (lab.job(job, "Restarts"), causes) == ("0", ["srun was killed"])
    (resumed,) = run.read_events("resumed")
    assert resumed["step"] > 0, "it saved when it was asked to stop"


def test_a_stopped_supervisor_is_woken(lab: Lab, run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    job = submit(lab, run, "--", "sleeps.py", str(tmp_path / "end"), cwd=tmp_path)
    wait_until(lambda: run.log(0, 1, 1).exists(), 500, lambda: "it does not begin")
    words = {"supervise", f"--run-dir={run.path}"}
    processes = psutil.process_iter(["cmdline"])
    mine = [other for other in processes if words <= {*(other.info["cmdline"] or [])}]
    (head,) = [other for other in mine if other.environ().get("SLURM_NODEID") == "0"]
    head.suspend()
    wait_until(lambda: head.status() == psutil.STATUS_STOPPED, 500, lambda: "it is not stopped")
    wait_until(lambda: head.status() != psutil.STATUS_STOPPED, 500, lambda: "nobody wakes it")
    (tmp_path / "end").touch()
    assert lab.wait_job(job) == "COMPLETED"
    assert not list(run.job.glob("rendezvous/*.failed.json")), "nobody was blamed"


def test_a_job_ends_with_its_run_though_slurmstepd_was_killed(
    lab: Lab, run: RunDir, tmp_path: Path
) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    job = submit(lab, run, "--", "sleeps.py", str(tmp_path / "end"), cwd=tmp_path)
    wait_until(lambda: run.log(0, 1, 1).exists(), 500, lambda: "it does not begin")
    title = f"slurmstepd: [{job}.0]"
    processes = psutil.process_iter(["cmdline"])
    named = [other for other in processes if title in " ".join(other.info["cmdline"] or [])]
    steps = [other for other in named if lab.has(other.pid)]
    assert len(steps) == 2, "one on each host"
    for step in steps:
        step.kill()
    (tmp_path / "end").touch()
    assert lab.wait_job(job) == "COMPLETED"
    assert says(lab, run, "why").startswith("run it has not failed: done")


@BOTH_TRACKERS
def test_a_suspended_job_continues_as_if_nothing_had_been(
    lab: Lab, proctrack: str, run: RunDir, tmp_path: Path
) -> None:
    steps = ["train.steps=150", "checkpoint.every=null", "model.name=tests.helpers.user_code:gated"]
    # A step takes 0.2 s until both suspensions are over.
    job = submit(lab, run, *WORDS, *steps, gate=f"1:0.2:{tmp_path / 'quick'}")
    wait_until(lambda: count(run, "first_step") == 1, 500, lambda: "there is no step")
    for seconds in (1, 9):  # longer than a process may be stopped, and a supervisor be silent
        lab.output("login", "scontrol", "suspend", job)
        wait_until(lambda: lab.job(job, "JobState") == "SUSPENDED", 500, lambda: "it runs on")
        time.sleep(seconds)
        lab.output("login", "scontrol", "resume", job)
        time.sleep(2)
    assert len(run.read_metrics()) < 150, "the job ended before it was suspended twice"
    (tmp_path / "quick").touch()
    assert lab.wait_job(job, 180) == "COMPLETED"
    assert [attempt.state for attempt in find.attempts(run)] == ["finished"]
    assert not list(run.job.glob("rendezvous/*.failed.json")), "nobody was blamed"
    assert [line.step for line in run.read_metrics()] == list(range(1, 151))
    assert not (run.job / "restarts.jsonl").exists()
    if proctrack == "cgroup":
        alone = RunDir(run.path.parent, "alone")  # not suspended: its losses are the same
        other = submit(lab, alone, *WORDS, *steps)
        assert lab.wait_job(other, 180) == "COMPLETED"
        expected = [line.loss for line in alone.read_metrics()]
        assert [line.loss for line in run.read_metrics()] == expected
