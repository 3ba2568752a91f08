"""The same program under torchrun, mpirun and alone: as the README says it."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from train.run import RunDir, read_lines

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def run(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **env},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_torchrun_trains_the_default_recipe(tmp_path: Path) -> None:
    words = ["run.name=first", f"run.root={tmp_path}"]
    done = run(["torchrun", "--nproc_per_node=4", "-m", "train", *words])
    assert done.returncode == 0, done.stderr
    assert "rollcall: 4 ranks (torchrun), cpu, ddp" in done.stdout
    run_dir = RunDir(tmp_path, "first")
    accuracy = [line["accuracy"] for line in read_lines(run_dir.events) if "accuracy" in line][-1]
    assert accuracy >= 0.97
    assert f"{accuracy:.2%}" in done.stdout
    assert str(run_dir.path) in done.stdout.replace("\n", "")
    verdict = run_dir.read_verdict()
    assert verdict is not None and verdict.state == "done"
    assert sorted(path.name for path in run_dir.path.iterdir()) == [
        "checkpoints",
        "claim",
        "config.yaml",
        "events.jsonl",
        "metrics.jsonl",
        "verdict.json",
    ]


def test_mpirun_finds_its_ranks(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None and not os.environ.get("CI"):
        pytest.skip("mpirun is not installed: apt-get install openmpi-bin runs this test")
    words = ["run.name=mpi", f"run.root={tmp_path}", "train.steps=3"]
    done = run(
        ["mpirun", "--oversubscribe", "-n", "2", sys.executable, "-m", "train", *words],
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks (mpirun)" in done.stdout


def test_alone_on_a_terminal_shows_a_progress_bar(tmp_path: Path) -> None:
    words = ["run.name=alone", f"run.root={tmp_path}", "train.steps=5"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "train", *words],
        cwd=ROOT,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 4096):
            shown += data
    except OSError:  # Linux: the other side has closed the terminal
        pass
    assert process.wait() == 0
    text = shown.decode()
    assert "step 5/5" in text and "━" in text and "samples/s" in text and "loss" in text


@pytest.mark.parametrize(
    ("words", "env", "expected"),
    [
        (["optim.rl=1"], {}, "did you mean 'optim.lr'"),
        ([], {"RANK": "0"}, "has RANK but not"),
        (["device=cuda"], {}, "device=cuda promises GPUs"),
        (["run.root=/proc/nowhere"], {}, "the run directory cannot be written"),
        (["model.name=absent:thing"], {}, "there is no module 'absent'"),
        (["data.name=mnist", "data.root=/proc/nowhere"], {}, "by hand"),
    ],
)
def test_a_bad_request_is_one_line(
    tmp_path: Path, words: list[str], env: dict[str, str], expected: str
) -> None:
    if words == ["device=cuda"] and Path("/proc/driver/nvidia").exists():
        words = ["device=cuda"]
        env = {"CUDA_VISIBLE_DEVICES": ""}
    refused = run([sys.executable, "-m", "train", f"run.root={tmp_path}", *words], **env)
    assert refused.returncode == 2
    assert expected in refused.stderr
    assert "Traceback" not in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
