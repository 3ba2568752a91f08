"""Sweeps and arrays on a machine without Slurm: some at a time, each with its share."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkout import ROOT

from rollcall.launch.sweep.local import divide
from rollcall.records.run_dir import RunDir
from rollcall.system import hosts

ROLLCALL = [sys.executable, str(ROOT / "env" / "bin" / "rollcall")]
SCRIPT = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
lr = sys.argv[2] if len(sys.argv) > 2 else os.environ["SLURM_ARRAY_TASK_ID"]
place = pathlib.Path(__file__).resolve().parents[3]
(place / f"began-{lr}").touch()
cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
print(lr, cpus, flush=True)
if lr == "1":  # the first runs until the third has begun, so the second has ended before
    while not (place / "began-3").exists():
        time.sleep(0.02)
if lr == "4":
    time.sleep(600)
sys.exit(3 if lr == "2" and not (place / "mended").exists() else 0)
"""


def test_gpus_and_cpus_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    by_gpus = divide(None, 1, 2, 100)
    assert [share.gpus for share in by_gpus] == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]
    assert [len(share.cpus) for share in by_gpus] == [4, 4, 4, 4]
    monkeypatch.setattr(hosts, "usable_cpus", lambda: 16)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [share.cpus for share in divide(None, 8, 0, 3)] == [[*range(8)], [*range(8, 16)]]
    assert [share.gpus for share in divide(1, 1, 0, 3)] == [[]]


@pytest.mark.long
def test_a_sweep_runs_here_and_only_what_failed_runs_again(tmp_path: Path, bare: str) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "fit.py").write_text(SCRIPT)
    options = f"{{nproc-per-node: 1, python: {bare.partition('=')[2]}}}"
    head = f'program: ["--", fit.py]\noptions: {options}\nthrottle: 2\n'
    sweep = project / "s.yaml"

    def rollcall(*words: str) -> str:
        done = subprocess.run(
            [*ROLLCALL, *words], cwd=project, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def states(count: int) -> dict[str, str]:
        """The verdicts of the cells, once this number exists and the sweep has ended."""
        end = time.monotonic() + 500
        while True:
            found = {path.parent.name: path for path in project.glob("runs/s/*/verdict.json")}
            if time.monotonic() > end or (len(found) >= count and " s " not in rollcall("status")):
                break
            time.sleep(0.2)
        runs = {name: RunDir(project / "runs" / "s", name) for name in sorted(found)}
        return {name: str(run.read_verdict().state) for name, run in runs.items()}  # type: ignore[union-attr]

    sweep.write_text(head + 'grid: {lr: ["1", "2", "3"]}\n')
    rollcall("sweep", "submit", "--local", "s.yaml")
    assert states(3) == {"lr-1": "done", "lr-2": "failed", "lr-3": "done"}
    (project / "mended").touch()
    sweep.write_text(head + 'grid: {lr: ["1", "2", "3", "4"]}\n')
    assert "2 of 4 cells: lr-2, lr-4" in rollcall("sweep", "submit", "--local", "s.yaml")
    second = RunDir(project / "runs" / "s", "lr-2")
    while (
        not (project / "began-4").exists() or getattr(second.read_verdict(), "state", "") != "done"
    ):
        time.sleep(0.1)
    rollcall("cancel", "s")
    assert states(4) == {"lr-1": "done", "lr-2": "done", "lr-3": "done", "lr-4": "stopped"}

    rollcall("submit", "--local", "--array=7,9", "--name=a", bare, "--", "fit.py")
    while not all((project / f"began-{task}").exists() for task in (7, 9)):
        time.sleep(0.1)
