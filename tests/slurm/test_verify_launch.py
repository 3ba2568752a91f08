"""Runs started in different ways on a cluster end with the same weights."""

from __future__ import annotations

import sys
from pathlib import Path

from checkout import ROOT
from lab import Lab

WORDS = ["train.steps=4", "device=cpu", "data.global_batch=30", "model.dropout=0.1", "exact=true"]
PYTHON = [sys.executable, "-m", "train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
WAYS = {
    "python": PYTHON,
    "torchrun": [*TORCHRUN, "-m", "train"],
    "srun": ["srun", "--ntasks=2", *PYTHON],
    "submit": [sys.executable, "launch/submit.py", "--wait", "--nproc-per-node=2"],
}


def test_every_launcher_reaches_the_same_weights(lab: Lab, tmp_path: Path) -> None:
    for name, command in WAYS.items():
        words = [*WORDS, f"run.root={tmp_path}", f"run.name={name}"]
        done = lab.exec("login", *command, *words, cwd=ROOT, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
    runs = [str(tmp_path / name) for name in WAYS]
    done = lab.exec("login", *PYTHON, "verify", "runs", *runs, cwd=ROOT, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout[done.stdout.index("way ") :].splitlines()[1:]
    ways = [tuple(part.strip() for part in line.split("  ") if part) for line in table]
    assert [way[1:3] for way in ways] == [("1", "4"), ("2", "4"), ("2", "4"), ("2", "4")]
    assert [way[4:] for way in ways] == [(), ("equal",), ("equal",), ("equal",)]
    assert len({way[3] for way in ways}) == 1
