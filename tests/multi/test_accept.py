"""`rollcall accept` on this machine: its page, and what it says of strategies that are wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollcall.train.dist.run import Run

ROOT = Path(__file__).parents[2]


class Planted:
    """A callback that spoils weights under zero3, and fails under zero2."""

    def __init__(self, run: Run, model: nn.Module) -> None:
        self.strategy, self.model = run.config.parallel.strategy, model

    def settle(self, step: int, agreed: Mapping[str, object]) -> None:  # noqa: ARG002
        if self.strategy == "zero3" and step == 3:
            with torch.no_grad():
                for weight in self.model.parameters():
                    getattr(weight, "_local_tensor", weight).add_(1e-4)
        if self.strategy == "zero2" and step == 3:
            raise OSError("planted")


def accept(root: Path, *words: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Return the exit code, the rows by check, and what is printed."""
    command = [sys.executable, "-m", "rollcall", "accept", f"--root={root}", "--name=it", *words]
    env = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(
        command, cwd=root, env=env, capture_output=True, text=True, timeout=290, check=False
    )
    found = json.loads((root / "it" / "accept.json").read_text())
    assert found["facts"]["ranks"].startswith("2 on ") and "torch" in found["facts"]["versions"]
    page = (root / "it" / "accept.md").read_text()
    assert page in done.stdout, done.stdout + done.stderr
    return done.returncode, {row["check"]: row for row in found["rows"]}, page


def test_two_ranks_of_this_machine_pass(tmp_path: Path) -> None:
    """All but the doctor, whose answer depends on the machine that runs this."""
    checks = "network,bandwidth,strategy,kill,exact,memory,overhead"
    code, rows, page = accept(tmp_path, "--", "--only", checks)
    of_four = {"strategy hsdp", "strategy zero3 and tensor"}
    for name, row in rows.items():
        expected = "not applicable" if name in of_four | {"bandwidth"} else "passed"
        assert row["state"] == expected, page
    assert len(rows) == 17 and code == 0
    assert "rank 1 got SIGKILL" in rows["kill and resume"]["text"]
    assert rows["kill and resume"]["text"].endswith("equal to the last bit")


def test_a_wrong_strategy_fails_with_its_cause_and_the_others_pass(tmp_path: Path) -> None:
    planted = "train.callbacks={wrong: {name: test_accept:Planted}}"
    code, rows, page = accept(tmp_path, "--", "--only", "strategy zero", planted)
    assert code == 1 and page.splitlines()[2].startswith("FAILED: 2 failed, "), page
    states = {name: row["state"] for name, row in rows.items()}
    assert states["strategy zero1"] == "passed" and states["strategy zero3"] == "failed", page
    assert rows["strategy zero3"]["text"].startswith("losses differ by "), page
    assert states["strategy zero2"] == "failed"
    assert "raised OSError: planted" in rows["strategy zero2"]["text"], page
