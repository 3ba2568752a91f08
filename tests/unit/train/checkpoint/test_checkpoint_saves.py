"""When a run saves, and what happens if a save fails, hangs or comes too late."""

from __future__ import annotations

import re
import resource
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from checkpoints import assert_same, restored, save, state, stopped
from disks import until

from rollcall.config import parse
from rollcall.records.run_dir import RunDir
from rollcall.train.checkpoint import background, layout, manifest, write
from rollcall.train.checkpoint.engine import Engine, Hooks
from rollcall.train.checkpoint.saver import Saver
from rollcall.train.checkpoint.store import CheckpointStore
from rollcall.train.ranks.deadline import Deadline
from rollcall.train.ranks.run import Run
from rollcall.train.ranks.signals import PERSON, SCHEDULER
from rollcall.train.ranks.world import World


def test_a_disk_that_takes_no_more_costs_one_checkpoint(world: World, tmp_path: Path) -> None:
    checkpoints = Engine(CheckpointStore(tmp_path, world))
    save(checkpoints, 1, state(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        checkpoints.begin(2, state(2))
        outcome = checkpoints.drain()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert outcome is not None and "File too large" in outcome.problem
    save(checkpoints, 3, state(3))
    assert sorted(layout.published(tmp_path)) == [1, 3]
    deadline = time.monotonic() + 60  # a thread removes what was written
    while any(path.name.startswith(".") for path in tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_disk_that_does_not_answer_is_given_up(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Engine(CheckpointStore(tmp_path, world))
    save(checkpoints, 1, state(1))
    before = set(psutil.Process().children())
    monkeypatch.setattr(write, "write_part", stopped)
    checkpoints.begin(2, state(2))
    [writer] = set(psutil.Process().children()) - before
    assert checkpoints.wait(0.1) is None and checkpoints.busy
    outcome = checkpoints.drain(0.1)
    assert outcome and re.fullmatch(r"it was not on disk after \d+ s", outcome.problem)
    assert not checkpoints.busy and sorted(layout.published(tmp_path)) == [1]
    writer.wait(500)


@pytest.mark.parametrize("hanging", [1, background.START_ATTEMPTS])
def test_a_writer_that_never_begins_is_replaced(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: int
) -> None:
    """A fork can meet a lock that another thread held; with all of them hanging none is left."""
    tries = tmp_path / "tries"

    def hang() -> None:
        with tries.open("ab") as file:
            file.write(b".")
        if tries.stat().st_size <= hanging:
            signal.pause()

    monkeypatch.setattr(background, "die_with_parent", hang)
    monkeypatch.setattr(background, "START_TIMEOUT", 1.0)
    checkpoints = Engine(CheckpointStore(tmp_path / "checkpoints", world))
    checkpoints.begin(1, state(1))
    outcome = checkpoints.drain(60)
    assert outcome is not None and not outcome.problem
    assert tries.stat().st_size == min(1 + hanging, background.START_ATTEMPTS)
    found = restored(checkpoints, state(0))
    assert found is not None
    assert_same(found[1], state(1))


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_writer_that_dies_costs_one_checkpoint(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: signal.Handlers
) -> None:
    """Also in a process that ignores its children, as its parent may have left it."""
    previous = signal.signal(signal.SIGCHLD, handler)
    try:
        checkpoints = Engine(CheckpointStore(tmp_path, world))
        before = set(psutil.Process().children())
        with monkeypatch.context() as patch:
            patch.setattr(write, "write_part", stopped)
            checkpoints.begin(1, {"x": torch.ones(2)})
        [writer] = set(psutil.Process().children()) - before
        writer.kill()
        outcome = checkpoints.drain()
        assert outcome is not None and "the writing process of rank 0 died" in outcome.problem
        save(checkpoints, 2, {"x": torch.ones(2)})
    finally:
        signal.signal(signal.SIGCHLD, previous)


def test_who_stops_the_job_does_not_stop_the_save(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Engine(CheckpointStore(tmp_path, world))
    before = set(psutil.Process().children())
    monkeypatch.setattr(write, "write_part", stopped)
    checkpoints.begin(1, state(1))
    [writer] = set(psutil.Process().children()) - before
    until(lambda: writer.status() == psutil.STATUS_STOPPED)
    for number in PERSON | SCHEDULER:
        writer.send_signal(number)
    writer.resume()
    outcome = checkpoints.drain()
    assert outcome is not None and not outcome.problem


def test_an_old_one_of_another_version_hinders_no_search_for_the_best(
    world: World, copied: Path
) -> None:
    (layout.path_of(copied, 1) / manifest.NAME).write_text('{"format": 1, "step": 1}\n')
    run_dir = RunDir(copied.parent, ".")  # whose checkpoints they are
    _, config = parse(["checkpoint.keep_best=loss"])
    saves = Saver(Run(config, world, run_dir), lambda: state(0), Deadline(run_dir.job))
    found = saves.resume()
    assert found is not None and found[0] == 2


def test_an_attempt_that_lost_the_run_publishes_nothing(world: World, tmp_path: Path) -> None:
    def check() -> None:
        raise PermissionError("another attempt has the run")

    checkpoints = Engine(CheckpointStore(tmp_path, world), Hooks(before_publishing=check))
    with pytest.raises(OSError, match="another attempt has the run"):
        save(checkpoints, 1, state(1))
    assert not layout.published(tmp_path)
