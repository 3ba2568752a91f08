"""When a job is queued again, and as what, with small executables in place of Slurm's commands."""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
from checkout import ROOT

from rollcall.launch.batch import batch as batch_module
from rollcall.launch.batch import placement
from rollcall.launch.runs import restarts
from rollcall.launch.runs.decision import BAD_HOST
from rollcall.records.attempt import AttemptEvent, NodeState, PartState, new_attempt
from rollcall.records.job import Submission
from rollcall.records.run import Verdict
from rollcall.records.run_dir import RunDir

RUNNING = "RUNNING|None|2030-01-01T00:00:00|N/A"
PREEMPTED = "{}|None|2030-01-01T00:00:00|2029-01-01T00:00:00"
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
AGAIN = ["scontrol requeue 7", "scontrol update JobId=7 StartTime=now+8"]
Batch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path, "it")
    run.job.mkdir(parents=True)
    return run


@pytest.fixture
def batch(run: RunDir, tmp_path: Path) -> Batch:
    """Run a job's script: a step with this exit code and verdict in a job that stands like this."""

    def fake(name: str, body: str) -> None:
        # Where there is no room for the script, there is for what Slurm hears.
        (tmp_path / name).write_text(f"#!/bin/bash\nulimit -S -f unlimited\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def start(
        code: int,
        standing: str = RUNNING,
        verdict: str = "",
        job: dict[str, str] = JOB,
        words: tuple[str, ...] = (),
        script: tuple[str, ...] = (),
        srun: str = "",
        scontrol: str = "",
        room: int = resource.RLIM_INFINITY,
        output: int | IO[str] = subprocess.PIPE,
    ) -> subprocess.CompletedProcess[str]:
        told = json.dumps({"state": verdict, "step": 5, "reason": "asked"})
        wrote = f"echo '{told}' >{run.verdict}" if verdict else ""
        fake("srun", f"{srun}\n{wrote}\nexit {code}")
        # Slurm takes the number that a task shares with its array for the whole array.
        tasks = 3 if "SLURM_ARRAY_JOB_ID" in job else 1
        fake(
            "squeue",
            'case "$*" in\n*%P*) echo "main||n[8-9]|(null)" ;;\n'
            f"*' -j 7') for i in {{1..{tasks}}}; do echo '{standing}'; done ;;\n"
            f"*) echo '{standing}' ;;\nesac",
        )
        fake("sinfo", "printf '%s|8|16000|(null)|(null)\\n' n1 n2")
        for name in ("scontrol", "scancel"):
            fake(name, f'echo {name} "$@" >>{tmp_path}/told\n{scontrol}')
        place = [f"run.root={tmp_path}", f"run.name={run.name}"]
        command = [sys.executable, "-m", "launch", "batch", *words]
        step = ["-m", "train", "digits", *place]
        if script:
            step = ["-m", "rollcall", "supervise", f"--run-dir={run.path}", *script]
        command += ["srun", "--nodes=2", "python", *step]
        path = f"{tmp_path}:{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, **job}
        limit = functools.partial(
            resource.setrlimit, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY)
        )
        return subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            preexec_fn=limit,
            stdout=output,
            stderr=output,
            text=True,
            timeout=500,
            check=False,
        )

    return start


def told(run: RunDir) -> list[str]:
    """What Slurm has heard."""
    path = run.path.parent / "told"
    return path.read_text().splitlines() if path.exists() else []


def test_a_step_is_over_once_the_run_ended_with_it_and_all_nodes_have_said_how(run: RunDir) -> None:
    process = batch_module.BatchProcess(argparse.Namespace(command=[], output=None), [], "7")
    process.run = run

    def write(state: PartState) -> None:
        for node in (0, 1):
            NodeState(0, node, f"n{node}", state, 1.0, 1).write(run.path)

    started = AttemptEvent(0, "7", "started", 1.0, ["n1", "n2"], 2)
    started.append(run.path)
    new_attempt(run.path, 0)
    write("running")
    run.conclude(Verdict("done", 5, ""))
    assert process._ended_attempt(0) is None, "it runs"
    replace(started, event="ended", state="finished", exit_code=0).append(run.path)
    assert process._ended_attempt(0) is not None
    assert process._ended_attempt(1) is None, "it belongs to an earlier step"
    assert not process._have_all_ended(0), "the nodes have not said how"
    write("finished")
    assert process._have_all_ended(0)
    run.forget_verdict()
    assert process._ended_attempt(0) is None, "it may start again"


def test_a_part_of_a_chain_that_saved_has_not_failed(run: RunDir, batch: Batch) -> None:
    for job, code in (("7", 75), ("8", 0)):
        Submission(job, 1.0).append(run.path)
        assert batch(75, verdict="requeue", scontrol="exit 1").returncode == code
    assert batch(3, verdict="failed").returncode == 3


def test_a_task_of_an_array_speaks_for_itself_alone(run: RunDir, batch: Batch) -> None:
    task = {**JOB, "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    done = batch(75, verdict="requeue", job=task)
    assert (done.returncode, told(run)) == (75, [line.replace("7", "7_2", 1) for line in AGAIN])


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_a_job_that_is_preempted_comes_back(run: RunDir, batch: Batch, state: str) -> None:
    """In its grace time, be it that SIGTERM has ended the step; and where Slurm only cancels it."""
    done = batch(143, PREEMPTED.format(state))
    assert told(run)[:2] == AGAIN, done.stderr


def test_a_job_that_slurm_ends_waits_no_longer_for_having_saved(run: RunDir, batch: Batch) -> None:
    wait = f"kill -TERM $PPID; until [[ -s {run.path.parent}/told ]]; do sleep 0.1; done"
    done = batch(75, "COMPLETING|TimeLimit|2030-01-01T00:00:00|N/A", srun=wait)
    assert told(run) == [*AGAIN, AGAIN[1]], done.stderr


TIME_LIMIT = "COMPLETING|TimeLimit|2030-01-01T00:00:00|N/A"
OTHERS = ("--", "script.py")
CASES = {
    "time limit": ((143, TIME_LIMIT), OTHERS, False),
    "its own end near the limit": ((1, RUNNING.replace("2030", "2020")), OTHERS, False),
    "preemption": ((143, PREEMPTED.format("RUNNING")), OTHERS, True),
    "time limit, asked for": ((143, TIME_LIMIT), ("--max-restarts=1", *OTHERS), True),
    "time limit, never asked for": ((143, TIME_LIMIT), ("--max-restarts=0", *OTHERS), False),
    "exit code 75": ((75, TIME_LIMIT), OTHERS, True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_script_comes_back_only_if_it_has_said_that_it_can_continue(
    run: RunDir, batch: Batch, case: str
) -> None:
    (code, standing), script, comes_back = CASES[case]
    # The signal that comes before the time limit, and the one that comes at it.
    ends = "trap '' USR2; kill -USR2 $PPID; sleep 0.5; kill -TERM $PPID; sleep 2"
    done = batch(code, standing, script=script, srun=ends)
    assert ("scontrol requeue 7" in told(run)) == comes_back, done.stderr
    assert done.stderr.count("is not restarted") == (not comes_back)
    if not comes_back:
        verdict = run.read_verdict()
        assert verdict is not None
        assert (verdict.state, verdict.reason.partition(";")[0]) == ("failed", "time limit")


def test_a_busy_controller_is_asked_another_time(run: RunDir, batch: Batch) -> None:
    once = f"[[ $1 != requeue || -e {run.path}/asked ]] || {{ touch {run.path}/asked; exit 1; }}"
    done = batch(75, verdict="requeue", scontrol=once)
    assert told(run) == [AGAIN[0], *AGAIN]
    assert "could not be requeued" not in done.stderr


def test_what_slurm_has_queued_again_itself_is_no_refusal(run: RunDir, batch: Batch) -> None:
    refusal = "[[ $1 != requeue ]] || { echo 'Job is pending execution for job 7' >&2; exit 1; }"
    done = batch(75, PREEMPTED.format("COMPLETING"), scontrol=refusal)
    assert told(run)[:2] == AGAIN
    assert "could not be requeued" not in done.stderr


def test_a_refused_request_ends_the_job_whatever_an_earlier_start_has_left(
    run: RunDir, batch: Batch
) -> None:
    run.verdict.write_text(json.dumps({"state": "requeue", "step": 5, "reason": "asked"}))
    assert (batch(2).returncode, told(run)) == (2, [])


def test_a_full_disk_keeps_no_job_from_coming_back(run: RunDir, batch: Batch) -> None:
    with Path("/dev/full").open("w") as full:
        done = batch(75, verdict="requeue", room=0, output=full)
    assert (done.returncode, told(run)) == (75, AGAIN)


@pytest.mark.parametrize(("hosts", "left_out"), [("n1", " ExcNodeList=n2,n8,n9"), ("n[1-2]", "")])
def test_a_bad_host_is_left_out_where_there_are_others(
    run: RunDir, batch: Batch, hosts: str, left_out: str
) -> None:
    for _ in range(BAD_HOST):
        restarts.note(run, "7", "preempted", ["n2"])
    done = batch(75, verdict="requeue", job={**JOB, "SLURM_JOB_NODELIST": hosts})
    assert told(run) == [AGAIN[0], AGAIN[1] + left_out]
    assert ("cannot exclude n2" in done.stderr) == (not left_out)


def test_who_took_a_job_over_does_not_cancel_it_when_it_is_queued_again(
    run: RunDir, batch: Batch
) -> None:
    step = {**JOB, "SLURM_STEP_ID": "3"}
    words = ("--number=1", "--output=/dev/null")
    assert batch(75, RUNNING.replace("RUNNING", "COMPLETING"), job=step, words=words).returncode
    assert [line for line in told(run) if line.startswith("scancel")] == []
    assert batch(0, verdict="done", job=step, words=words).returncode == 0
    assert told(run)[-1] == "scancel 7"


def test_a_command_that_is_not_there_is_an_error_in_a_line(run: RunDir) -> None:
    command = [sys.executable, "-m", "launch", "batch", "./no-srun", "-m", "train", "digits"]
    place = [f"run.root={run.path.parent}", "run.name=it"]
    env = {**os.environ, **JOB}
    done = subprocess.run([*command, *place], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "no-srun" in done.stderr


def test_teardown_lines_run_after_the_step(tmp_path: Path, batch: Batch) -> None:
    lines = (f"echo $ROLLCALL_EXIT_CODE $SLURM_JOB_ID >{tmp_path}/after", "false")
    done = batch(3, words=tuple(f"--teardown={line}" for line in lines))
    assert (done.returncode, (tmp_path / "after").read_text()) == (3, "3 7\n")
    assert "the lines of --teardown end with exit code 1" in done.stderr


def test_a_host_that_the_preflight_leaves_out_is_no_spare_later(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "bad_hosts", lambda *_: {"n2": "mtu"})
    monkeypatch.setattr(placement, "remember", lambda *_: None)
    monkeypatch.setattr(placement, "_silent", lambda _job, suspects: {*suspects})
    monkeypatch.setattr(restarts, "bad_hosts", lambda *_: [])
    given = {"command": ["srun", "--nodes=2", "x"], "preflight": True, "number": 0, "output": None}
    job = batch_module.BatchProcess(argparse.Namespace(**given), [], "7")
    job._hosts = placement.Hosts({**JOB, "SLURM_JOB_NODELIST": "n[1-4]"}, 2, None)
    assert "--nodelist=n1,n3" in job._first_command(run)
    monkeypatch.setattr(job, "_new_losses", lambda: {"n1": "n1"})
    monkeypatch.setattr(job, "_may_start", lambda *_: True)
    assert job._next_hosts(run) == ["n3", "n4"]
    # Groups of nodes cannot change, so their step starts as it is.
    job._hosts._has_groups = True
    assert job._first_command(run) == given["command"]
