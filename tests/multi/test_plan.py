"""`train plan` tells of any number of ranks what those ranks would tell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import train

WORDS = ["digits", "data.global_batch=512", "train.steps=1", "data.micro_batch=16"]


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "train", "plan", *words]
    return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_the_plan_is_what_the_ranks_say(strategy: str, tmp_path: Path) -> None:
    words = [*WORDS, f"parallel.strategy={strategy}"]
    planned = plan("--ranks=4", *words)
    assert planned.returncode == 0, planned.stderr
    first, said = planned.stdout.splitlines()
    assert "1 steps of 512 samples" in first and "128 samples a step on each rank, in 8" in first
    output = train(4, [*words, f"run.root={tmp_path}", "run.name=real"], tmp_path / "logs")
    assert f"rollcall: {said}\n" in output


def test_a_thousand_ranks_are_refused_as_there() -> None:
    refused = plan("--ranks=1024", "--node-size=8", *WORDS)
    assert refused.returncode == 2
    assert (
        "data.global_batch=512: expected at least 1024, one sample for each share of"
        in refused.stderr
    )
