"""Supervisors that are stopped, or wait for a slow disk, while their ranks train on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from checkout import ROOT

from rollcall.launch.runs import find
from rollcall.records.attempt import NodeState
from rollcall.records.run_dir import RunDir

SCRIPT = """
import pathlib, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
end, ends = pathlib.Path(sys.argv[1]), torch.zeros(1)
print("begun", flush=True)
while not ends:
    ends = torch.tensor(float(end.exists()))
    dist.broadcast(ends, 0)
    time.sleep(0.01)
"""
WORDS = ["--local", "--nodes=2", "--nproc-per-node=1", "--wait", "--name=a", "--", "script.py"]
SHIM = ROOT / "tests" / "helpers" / "slow_files.c"
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="compiles a library in C")


@contextmanager
def training(place: Path, env: dict[str, str]) -> Iterator[RunDir]:
    """Let a script run on two nodes, which must end in order and without a lost node."""
    (place / "script.py").write_text(SCRIPT)
    submit = subprocess.Popen(
        [sys.executable, str(ROOT / "launch" / "submit.py"), *WORDS, str(place / "over")],
        cwd=place,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run = RunDir(place / "runs", "a")
    try:
        logs = [run.log(0, node, node) for node in range(2)]
        end = time.monotonic() + 500
        while not all(log.exists() and "begun" in log.read_text() for log in logs):
            assert time.monotonic() < end and submit.poll() is None
            time.sleep(0.1)
        yield run
        (place / "over").touch()
        output, _ = submit.communicate(timeout=500)
    finally:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(submit.pid).children(recursive=True):
                child.kill()
        submit.kill()
        submit.wait()
    assert submit.returncode == 0, output
    assert not list(run.job.glob("rendezvous/*.failed.json")), "nobody was blamed"
    assert [attempt.state for attempt in find.attempts(run)] == ["finished"], output


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_stopped_supervisor_is_woken(tmp_path: Path, node: int) -> None:
    with training(tmp_path, {}) as run:
        state = NodeState.read(run.path, attempt=0, node=node)
        assert state is not None
        supervisor = psutil.Process(state.supervisor)
        supervisor.suspend()
        end = time.monotonic() + 500
        for expected in (True, False):
            while (supervisor.status() == psutil.STATUS_STOPPED) != expected:
                assert time.monotonic() < end, f"stopped: {not expected}"
                time.sleep(0.02)


@needs_compiler
@pytest.mark.parametrize(
    ("node", "latency", "lasts"),
    [
        pytest.param("1", 10.0, 11.0, marks=pytest.mark.long),  # a stall of one operation
        pytest.param("0", 30.0, 32.0, marks=pytest.mark.long),
    ],
)
def test_no_node_is_lost_for_slow_files(
    tmp_path: Path, node: str, latency: float, lasts: float
) -> None:
    """Each file operation of its supervisor in the run directory takes so many seconds."""
    library, flag = tmp_path / "slow.so", tmp_path / "flag"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, SHIM, "-ldl"], check=True)
    env = {"LD_PRELOAD": str(library), "SLOW_FLAG": str(flag), "SLOW_NODE": node}
    with training(tmp_path, {**env, "SLOW_ROOT": str(tmp_path / "runs")}):
        flag.write_text(str(latency))
        time.sleep(lasts)
        flag.unlink()
