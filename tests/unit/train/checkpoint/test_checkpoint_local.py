"""Node-local checkpoints of one process: where they lie, what of them stays, what is copied."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from checkpoints import save as save_on
from checkpoints import stopped
from disks import until

from rollcall.config import ConfigError, parse
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.train.checkpoint import layout, write, write_plan
from rollcall.train.checkpoint.engine import Engine, Hooks
from rollcall.train.checkpoint.node_local import (
    LocalTier,
    NodeLocalStore,
    directory_of,
    open_store,
)
from rollcall.train.checkpoint.saver import Saver
from rollcall.train.checkpoint.store import CheckpointStore
from rollcall.train.checkpoint.tools import verify
from rollcall.train.ranks.deadline import Deadline
from rollcall.train.ranks.run import Run
from rollcall.train.ranks.world import World


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path, "run")
    run_dir.create()
    return run_dir


def state() -> dict[str, Any]:
    return {"x": torch.arange(9)}


def opened(run_dir: RunDir, world: World) -> NodeLocalStore:
    return open_store(str(run_dir.path.parent / "disk"), run_dir, world)


def local_tier(run_dir: RunDir, world: World, shared: Engine) -> LocalTier:
    store = opened(run_dir, world)
    return LocalTier(Engine(store), store, shared)


def save(local: LocalTier, step: int, required: bool) -> None:
    local.engine.begin(step, state())
    result = local.engine.drain()
    assert result and not result.problem
    local.queue(result, required)


def test_each_node_writes_what_its_ranks_hold_and_copies_are_shared() -> None:
    everywhere = dict.fromkeys(range(8), 10)
    shares = write_plan.divide([everywhere] * 4, nodes=[7, 7, 5, 5])
    assert sorted(shares[0] + shares[1]) == sorted(shares[2] + shares[3]) == [*range(8)]
    assert [len(share) for share in shares] == [4, 4, 4, 4]


def test_where_they_lie(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.delenv("NOWHERE", raising=False)
    first = directory_of("$SCRATCH", run_dir)
    assert first.parent == Path("/scratch/me") and first.name.startswith("run-")
    assert directory_of("${SCRATCH}", RunDir(run_dir.path, "run")) != first
    for text in ("$NOWHERE/x", "x", "~/x"):
        with pytest.raises(ConfigError, match="expected an absolute path"):
            directory_of(text, run_dir)


def test_a_planted_directory_is_refused(world: World, run_dir: RunDir, tmp_path: Path) -> None:
    directory = opened(run_dir, world).directory
    assert directory.stat().st_mode & 0o777 == 0o700 and not [*directory.iterdir()]
    directory.chmod(0o770)
    with pytest.raises(ConfigError, match="writable by others"):
        opened(run_dir, world)
    directory.rmdir()
    directory.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is a link"):
        opened(run_dir, world)
    directory.unlink()
    directory.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(directory, 1234, 1234)
        with pytest.raises(ConfigError, match="belongs to another user"):
            opened(run_dir, world)


def test_what_an_earlier_run_of_the_name_has_left_goes(world: World, run_dir: RunDir) -> None:
    save_on(Engine(opened(run_dir, world)), 3, state())
    assert opened(run_dir, world).newest() == 3
    shutil.rmtree(run_dir.path)
    run_dir.create()
    assert opened(run_dir, world).newest() is None


def test_a_slow_copy_is_followed_by_that_of_the_newest(
    world: World, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Engine(CheckpointStore(run_dir.checkpoints, world, keep=9))
    local = local_tier(run_dir, world, shared)
    before = set(psutil.Process().children())
    with monkeypatch.context() as patch:
        patch.setattr(write, "write_part", stopped)
        shared.begin(1, state())
    [writer] = set(psutil.Process().children()) - before
    for step in (2, 3, 4, 5, 6):
        save(local, step, required=step == 3)
    assert sorted(layout.published(local.store.directory)) == [3, 5, 6]
    until(lambda: writer.status() == psutil.STATUS_STOPPED)
    writer.resume()
    while shared.busy:
        result = shared.drain()
        assert result and not result.problem
        local.copy_next()
    assert sorted(layout.published(shared.store.directory)) == [1, 3, 6]
    assert not verify.problems(shared.store.path_of(6))
    save_on(local.engine, 7, state())
    assert sorted(layout.published(local.store.directory)) == [6, 7]


def test_what_a_local_disk_has_lost_is_not_copied(world: World, run_dir: RunDir) -> None:
    shared = Engine(CheckpointStore(run_dir.checkpoints, world))
    local = local_tier(run_dir, world, shared)
    local.engine.begin(1, state())
    saved = local.engine.drain()
    assert saved and not saved.problem
    file = local.store.path_of(1) / "rank-00000.bin"
    file.write_bytes(bytes(file.stat().st_size))
    local.queue(saved, required=False)
    result = shared.drain()
    assert result and "rank-00000.bin is not what was written: x differs" in result.problem
    assert shared.store.newest() is None


def test_without_the_disk_saves_go_to_shared_storage(
    world: World, run_dir: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    config = parse(["checkpoint.local=/proc/nothing/here"])[1]
    saves = Saver(Run(config, world, run_dir), state, Deadline(run_dir.job))
    assert not saves.open() and saves.resume() is None
    assert not saves.is_due(1)
    saves.begin(100)
    saves.close()
    assert saves.checkpoints.store.newest() == 100
    [failure] = [line for line in read_lines(run_dir.events) if line["event"] == "save_failed"]
    assert failure["local"] and "/proc/nothing" in failure["reason"]
    assert "not used: /proc/nothing" in saves.summary()["local checkpoints"]
    assert "saves go directly to shared storage" in capfd.readouterr().out


def test_the_end_of_the_job_ends_the_waiting(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = time.monotonic() + 0.2
    hooks = Hooks(is_late=lambda: time.monotonic() > end)
    checkpoints = Engine(CheckpointStore(tmp_path, world), hooks)
    before = set(psutil.Process().children())
    monkeypatch.setattr(write, "write_part", stopped)
    checkpoints.begin(1, state())
    [writer] = set(psutil.Process().children()) - before
    outcome = checkpoints.drain(600)
    told = r"it was not on disk after \d+ s, and the job was about to end"
    assert outcome and re.fullmatch(told, outcome.problem)
    writer.wait(500)
