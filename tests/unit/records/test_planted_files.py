"""Pipes, devices and huge files in the place of a run's files keep no command waiting."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

FILES = (
    *("verdict.json", "metrics.jsonl", "phases.jsonl", "job/attempts.jsonl", "job/job.json"),
    *("job/restarts.jsonl", "job/submissions.jsonl", "job/packages.txt", "job/source.json"),
    "logs/attempt-0/node-0/rank-0.failed.json",
)
MEMORY = 8 * 2**30
"""Bytes of memory that a command may reserve; a huge file has more."""


def plant(kind: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**40)


@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
def test_no_command_waits_for_a_planted_file(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "planted"
    for name in FILES:
        plant(kind, run / name)
    plant(kind, tmp_path / "job.sbatch")
    plant(kind, tmp_path / "recipe.yaml")
    (run / "config.yaml").write_text("{}\n")
    (run / "events.jsonl").touch()
    commands = {
        "status": 0,
        "why planted": 0,
        "stacks planted": 2,
        "report planted": 0,
        "lint job.sbatch": 2,
        "explain recipe.yaml": 2,
    }
    for words, code in commands.items():
        command = [sys.executable, "-m", "rollcall", *words.split()]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=500,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
        )
        assert done.returncode == code, words + done.stderr
        assert "Traceback" not in done.stderr


def test_a_pipe_that_the_user_types_is_read(tmp_path: Path) -> None:
    command = f"{sys.executable} -m rollcall explain <(echo 'seed: 5')"
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert "seed=5" in done.stdout
