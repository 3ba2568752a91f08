"""Runs started in different ways on a cluster end with the same weights."""

from __future__ import annotations

import sys
from pathlib import Path

from checkout import ROOT
from lab import Lab

WORDS = ["train.steps=4", "device=cpu", "data.global_batch=30", "model.dropout=0.1"]


def test_every_launcher_reaches_the_same_weights(lab: Lab, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "train", "verify", "launch", "--ranks", "2", *WORDS]
    done = lab.exec("login", *command, f"run.root={tmp_path}", cwd=ROOT, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout[done.stdout.index("way ") :].splitlines()[1:]
    ways = [tuple(part.strip() for part in line.split("  ") if part) for line in table]
    assert [way[:3] for way in ways] == [
        ("python", "1", "4"),
        ("torchrun", "2", "4"),
        ("srun", "2", "4"),
        ("rollcall submit", "2", "4"),
    ]
    assert [way[4:] for way in ways] == [(), ("equal",), ("equal",), ("equal",)]
    assert len({way[3] for way in ways}) == 1
