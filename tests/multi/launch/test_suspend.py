"""A run that is stopped and continued, as by `scontrol suspend` or Ctrl-Z, loses nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from checkout import ROOT

from rollcall.launch.runs import find, states
from rollcall.records.run_dir import RunDir

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]
WAITS = """
import os, signal, subprocess, sys
from rollcall.system.process import wait_for_signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD])
me = os.getpid()
for _ in range(3):
    words = f"sleep 0.1; kill -STOP {me}; sleep 0.5; kill -CONT {me}"
    stopping = subprocess.Popen(["sh", "-c", words])
    assert wait_for_signal([signal.SIGTERM], 0.3) is None
    stopping.wait()
assert wait_for_signal([signal.SIGTERM, signal.SIGCHLD], 0.0) == signal.SIGCHLD
words = f"sleep 0.1; kill -STOP {me}; sleep 0.3; kill -TERM {me}; kill -CONT {me}"
subprocess.Popen(["sh", "-c", words])
assert wait_for_signal([signal.SIGTERM], 30) == signal.SIGTERM
"""
SCRIPT = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, end, total = dist.get_rank(), pathlib.Path(sys.argv[1]), torch.zeros(1)
print("rank", rank, flush=True)
ends = torch.zeros(1)
while not ends:
    number = torch.full((1,), float(rank))
    dist.all_reduce(number)
    total += number
    ends = torch.tensor(float(end.exists()))
    dist.broadcast(ends, 0)
    time.sleep(0.01)
everywhere = [torch.zeros(1) for _ in range(dist.get_world_size())]
dist.all_gather(everywhere, total)
assert len({float(one) for one in everywhere}) == 1 and total > 0
print("whole", flush=True)
"""


def test_a_signal_is_believed_only_if_it_came() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr


@contextmanager
def submitted(folder: Path, nodes: int) -> Iterator[tuple[subprocess.Popen[str], RunDir]]:
    """Submit the script on this machine with --wait; yield once all its ranks work."""
    (folder / "script.py").write_text(SCRIPT)
    words = ["--local", f"--nodes={nodes}", f"--nproc-per-node={2 // nodes}", "--wait", "--name=a"]
    submit = subprocess.Popen(
        [*SUBMIT, *words, "--", "script.py", str(folder / "over")],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run = RunDir(folder / "runs", "a")
    try:
        logs = [run.log(0, node, node) for node in range(nodes)]
        end = time.monotonic() + 500
        while not all(log.exists() and log.read_text() for log in logs):
            assert time.monotonic() < end and submit.poll() is None
            time.sleep(0.1)
        yield submit, run
        (folder / "over").touch()
        output, _ = submit.communicate(timeout=500)
    finally:
        for pid in _family(submit.pid):
            os.kill(pid, signal.SIGKILL)
        submit.wait()
    assert submit.returncode == 0, output
    assert [log.read_text().splitlines()[-1] for log in logs] == ["whole"] * nodes
    attempts = find.attempts(run)
    assert [attempt.state for attempt in attempts] == ["finished"], output
    verdict = run.read_verdict()
    assert verdict is not None and verdict.state == "done"
    assert not list(run.job.glob("rendezvous/*.failed.json")), "nobody was blamed"


@pytest.mark.long
def test_every_process_of_a_run_can_be_stopped_and_continued(tmp_path: Path) -> None:
    nodes = 2
    with submitted(tmp_path, nodes) as (submit, _):
        processes = _family(submit.pid)
        # submit, submitit's controller; a supervisor, a fork server, an agent and a rank per node
        assert len(processes) >= 2 + 4 * nodes, processes
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.6)  # longer than a supervisor waits for a signal
            os.kill(pid, signal.SIGCONT)
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(7)  # longer than a process may be stopped, and a supervisor be silent
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.05)
        time.sleep(1)


@pytest.mark.long
def test_whoever_waits_goes_on_if_the_process_is_killed_that_started_the_nodes(
    tmp_path: Path,
) -> None:
    with submitted(tmp_path, 2) as (submit, _):
        (controller,) = psutil.Process(submit.pid).children()
        controller.kill()
        controller.wait(500)  # until the one that waits has noticed
        assert submit.poll() is None


@pytest.mark.long
def test_whoever_stops_alone_in_a_run_of_one_node_is_woken(tmp_path: Path) -> None:
    with submitted(tmp_path, 1) as (submit, run):
        (controller,) = psutil.Process(submit.pid).children()
        supervisor = next(it for it in controller.children(True) if "supervise" in it.cmdline())
        for process in (controller, supervisor):
            process.suspend()
            time.sleep(0.5)
            (condition,), _ = states.look([run])
            assert condition.state == "running" and f"kill -CONT {process.pid}" in condition.note
            end = time.monotonic() + 200
            while process.status() == psutil.STATUS_STOPPED:
                assert time.monotonic() < end, f"nobody wakes {process.cmdline()}"
                time.sleep(0.2)


def _family(pid: int) -> list[int]:
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []
