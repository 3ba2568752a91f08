"""`rollcall accept` on this machine: its page, and what it says of strategies that are wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import HELPERS, ROOT
from torch import nn

from rollcall.train.ranks.agreement import Step
from rollcall.train.ranks.run import Run


def searched(*places: Path) -> str:
    """Return a PYTHONPATH: these places, and what this process has."""
    return os.pathsep.join(filter(None, [*map(str, places), os.environ.get("PYTHONPATH")]))


class Planted:
    """A callback that spoils weights under zero3, and fails under zero2."""

    def __init__(self, run: Run, model: nn.Module) -> None:
        self.strategy, self.model = run.config.parallel.strategy, model

    def settle(self, step: Step, agreed: Mapping[str, object]) -> None:  # noqa: ARG002
        if self.strategy == "zero3" and step.number == 3:
            with torch.no_grad():
                for weight in self.model.parameters():
                    getattr(weight, "_local_tensor", weight).add_(1e-4)
        if self.strategy == "zero2" and step.number == 3:
            raise OSError("planted")


def accept(root: Path, *words: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Return the exit code, the rows by check, and what is printed."""
    command = [
        sys.executable,
        "-m",
        "rollcall",
        "accept",
        f"--root={root}",
        "--local",
        "--name=it",
        *words,
    ]
    env = {**os.environ, "PYTHONPATH": searched(Path(__file__).parent, ROOT, HELPERS)}
    done = subprocess.run(
        command, cwd=root, env=env, capture_output=True, text=True, timeout=500, check=False
    )
    found = json.loads((root / "it" / "accept.json").read_text())
    assert found["facts"]["ranks"].startswith("2 on ") and "torch" in found["facts"]["versions"]
    page = (root / "it" / "accept.md").read_text()
    assert page in done.stdout and "Traceback" not in done.stdout, done.stdout + done.stderr
    times = [(root / "it" / name).stat().st_mtime_ns for name in ("accept.md", "verdict.json")]
    assert times == sorted(times), "written by the job"
    return done.returncode, {row["check"]: row for row in found["rows"]}, page


@pytest.mark.long
def test_a_wrong_strategy_fails_with_its_cause_and_the_others_pass(tmp_path: Path) -> None:
    planted = "train.callbacks={wrong: {name: test_accept:Planted}}"
    code, rows, page = accept(tmp_path, "--", "--only", "strategy zero", planted)
    assert code == 1 and page.splitlines()[2].startswith("FAILED: 2 failed, "), page
    states = {name: row["state"] for name, row in rows.items()}
    assert states["strategy zero1"] == "passed" and states["strategy zero3"] == "failed", page
    assert rows["strategy zero3"]["text"].startswith("losses differ by "), page
    assert states["strategy zero2"] == "failed"
    assert "raised OSError: planted" in rows["strategy zero2"]["text"], page


@pytest.mark.long
def test_the_tests_for_gpus_report_why_they_do_not_apply(tmp_path: Path) -> None:
    """And a test that fails, with its last words."""
    failing = tmp_path / "test_9_failing.py"
    failing.write_text("def test_it() -> None:\n    raise ValueError('planted')\n")
    for name in ("conftest.py", "test_1_training.py"):
        (tmp_path / name).write_text((ROOT / "tests" / "gpu" / name).read_text())
    conftest = (tmp_path / "conftest.py").read_text()
    # Without a GPU the hook skips all; here only what needs one.
    conftest = conftest.replace("HERE.parents[1]", "HERE").replace("in items:", "in items[:-1]:")
    (tmp_path / "conftest.py").write_text(conftest)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{HELPERS}", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", f"--rootdir={tmp_path}", str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    found = json.loads((tmp_path / "runs" / "gpu-report.json").read_text())
    rows = found["rows"]
    assert done.returncode == 1 and "torch" in found["facts"]["versions"]
    assert [row["state"] for row in rows] == ["not applicable"] * 2 + ["failed"], done.stdout
    assert rows[0]["text"].startswith("torch sees no GPU") and "planted" in rows[2]["text"]


@pytest.mark.long
def test_network_measures_between_ranks_of_this_machine(tmp_path: Path) -> None:
    """It writes its run below the directory where it is called, under the given name."""
    words = ["network", "--local", "--nproc-per-node=2", "--root", "mine", "-Jnet"]
    done = subprocess.run(
        [sys.executable, "-m", "rollcall", *words, "--", "--sizes=64K", "--device=cpu", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": searched(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    assert found["ranks"] == 2 and len(found["hosts"]) == 2 and found["backend"] == "gloo"
    assert {row["bytes"] for row in found["collectives"]} == {65536}
    assert all(row["bus"] > 0 for row in found["collectives"])
    assert (tmp_path / "mine" / "net").is_dir()
