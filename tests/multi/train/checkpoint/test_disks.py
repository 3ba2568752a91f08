"""Disks that take no more for a while, and disks that do not answer: the training goes on."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from disks import frozen, mounted, needs_root, run, until
from ranks import Ranks, logged_steps

from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines, write_atomic
from rollcall.train.checkpoint import layout
from rollcall.train.checkpoint.tools import verify
from rollcall.train.ranks.deadline import MARGIN

WORDS = ["digits", "model.name=mlp", "log.every=1", "train.evaluate_every=null", "device=cpu"]
WORDS += ["run.name=run", "train.steps=1000000", "checkpoint.every=5"]


def events(run_dir: RunDir, name: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(run_dir.events) if line["event"] == name]


def goes_on_after(run_dir: RunDir, forbid: Any, allow: Any, *words: str) -> str:
    """Train, forbid writing and allow it again; the reason that the run gives for what failed."""
    root = run_dir.path.parent
    ranks = Ranks(2, [*WORDS, f"run.root={root}", *words], root / "logs")
    try:
        return _goes_on_after(run_dir, ranks, forbid, allow)
    finally:
        ranks.kill()


def _goes_on_after(run_dir: RunDir, ranks: Ranks, forbid: Any, allow: Any) -> str:
    until(lambda: bool(layout.published(run_dir.checkpoints)))
    until(forbid)
    until(lambda: bool(events(run_dir, "save_failed")))
    left = layout.published(run_dir.checkpoints)
    assert left and not any(verify.problems(path) for path in left.values())
    assert allow()
    last = events(run_dir, "save_failed")[-1]["step"]
    until(lambda: max(layout.published(run_dir.checkpoints)) > last)
    ranks.processes[0].terminate()
    assert ranks.wait() == [75, 75]
    verdict = run_dir.read_verdict()
    assert verdict is not None and verdict.state == "requeue"
    assert max(layout.published(run_dir.checkpoints)) == verdict.step
    assert "failed saves" in ranks.output()
    return str(events(run_dir, "save_failed")[0]["reason"])


@needs_root
def test_a_read_only_file_system(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "run")

    def remount(how: str) -> bool:
        words = ["mount", "-o", f"remount,{how}", str(run_dir.checkpoints)]
        return not subprocess.run(words, stderr=subprocess.DEVNULL).returncode  # busy

    with mounted(run_dir.checkpoints, "tmpfs", "30m"):
        reason = goes_on_after(run_dir, lambda: remount("ro"), lambda: remount("rw"))
    assert "Read-only file system" in reason


@needs_root
def test_a_full_disk_that_holds_the_logs_too(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "disk", "run")
    root = run_dir.path.parent
    with mounted(root, "tmpfs", "8m"):
        ranks = Ranks(2, [*WORDS, f"run.root={root}"], root / "logs")
        try:
            until(lambda: bool(layout.published(run_dir.checkpoints)))
            main = psutil.Process(ranks.processes[0].pid)
            before = main.io_counters().write_count
            until(lambda: fill(root / "large") and main.io_counters().write_count > before + 300)
            (root / "large").unlink()
            last = max(layout.published(run_dir.checkpoints))
            until(lambda: max(layout.published(run_dir.checkpoints)) > last)
            ranks.processes[0].terminate()
            assert ranks.wait() == [75, 75]
        finally:
            ranks.kill()
        assert "No space left on device" in events(run_dir, "save_failed")[0]["reason"]
        steps = [line["step"] for line in logged_steps(run_dir)]
        assert steps == [*range(1, len(steps) + 1)]
        assert "failed saves" in ranks.output()


@pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")
def test_a_line_that_a_disk_refused_once_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    program = (
        "import sys; from rollcall.system.files import *; journal = Journal(Path(sys.argv[1]))\n"
        "for step in (1, 2): journal.append({'step': step})"
    )
    refusal = ["-P", str(path), "-e", "trace=write", "-e", "inject=write:error=ENOSPC:when=1"]
    subprocess.run(["strace", "-qq", *refusal, sys.executable, "-c", program, path], check=True)
    assert [line["step"] for line in read_lines(path)] == [1, 2]


def fill(path: Path) -> bool:
    """Take what room there is on a disk."""
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return True


@needs_root
@pytest.mark.skipif(
    not shutil.which("mkfs.btrfs"),
    reason="makes a file system with quotas: apt-get install btrfs-progs, then "
    "sudo -E ./env/run pytest tests/multi/train/checkpoint/test_disks.py",
)
def test_a_quota(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "run")

    def limit(size: str) -> bool:
        run("btrfs", "qgroup", "limit", size, run_dir.checkpoints)
        return True

    with mounted(run_dir.checkpoints, "btrfs", "128M"):
        run("btrfs", "quota", "enable", run_dir.checkpoints)
        size = "model.hidden_size=2500"  # 2.2 MB
        reason = goes_on_after(run_dir, lambda: limit("6M"), lambda: limit("none"), size)
    assert "Disk quota exceeded" in reason


def test_a_claim_that_cannot_be_read(tmp_path: Path) -> None:
    """As for a moment when a server does not know the file; others are kept off meanwhile."""
    run_dir = RunDir(tmp_path, "run")
    claim = run_dir.path / "claim-0"

    def move(source: Path, target: Path) -> bool:
        source.rename(target)
        return True

    away = claim.with_name("elsewhere")
    reason = goes_on_after(run_dir, lambda: move(claim, away), lambda: move(away, claim))
    assert f"No such file or directory: '{claim}'" in reason


def test_a_removed_run_directory_is_made_again(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "run")
    ranks = Ranks(2, [*WORDS, f"run.root={tmp_path}"], tmp_path / "logs")
    try:
        until(lambda: bool(layout.published(run_dir.checkpoints)))
        (tmp_path / "run").rename(tmp_path / "removed")  # at once, while the ranks go on writing
        until(lambda: run_dir.config.exists() and bool(layout.published(run_dir.checkpoints)))
        ranks.processes[0].terminate()
        assert ranks.wait() == [75, 75]
    finally:
        ranks.kill()
    assert f"{run_dir.path} was removed; it is made again for this save" in ranks.output()
    verdict = run_dir.read_verdict()
    assert verdict and max(layout.published(run_dir.checkpoints)) == verdict.step


@needs_root
@pytest.mark.long
def test_the_end_of_the_job_is_not_waited_for(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "run")
    with mounted(run_dir.checkpoints, "ext4", "16M"):
        words = [*WORDS, f"run.root={tmp_path}", "checkpoint.every=null"]
        ranks = Ranks(1, words, tmp_path / "logs")
        try:
            until(lambda: bool(events(run_dir, "first_step")))
            with frozen(run_dir.checkpoints):
                end = time.time() + MARGIN + 4  # the save is given up ten seconds before
                run_dir.job.mkdir()
                write_atomic(run_dir.job / "deadline.json", json.dumps({"end": end}))
                assert ranks.wait() == [75]
                assert time.time() < end
        finally:
            ranks.kill()
    verdict = run_dir.read_verdict()
    assert verdict is not None and verdict.state == "requeue"
    assert "the end of the job is near; step" in verdict.reason
    assert "and the job was about to end" in verdict.reason


@needs_root
def test_a_disk_that_stays_full_costs_the_verdict_and_not_the_summary(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    with mounted(root, "tmpfs", "8m"):
        words = [*WORDS, "train.steps=200", "checkpoint.every=100", f"run.root={root}"]
        ranks = Ranks(1, words, tmp_path / "logs")
        try:
            until(lambda: bool(events(RunDir(root, "run"), "first_step")))
            fill(root / "large")
            assert ranks.wait() == [1]  # the last save has failed
        finally:
            ranks.kill()
        assert "Traceback" not in ranks.output()
        shown = " ".join(ranks.output().replace("│", " ").split())
        assert "200 of 200" in shown and "failed saves" in shown
        is_written = RunDir(root, "run").read_verdict() is not None
        assert is_written != ("the verdict could not be written: No space" in shown)
