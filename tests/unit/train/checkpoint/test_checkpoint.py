"""Saving and loading, damage, and checkpoints written by somebody else."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_differences import differences
from checkpoints import assert_same, cut, empty, entry_of, flip, forge, restored, save, state
from disks import mounted, needs_root

from rollcall.config import ConfigError
from rollcall.train.checkpoint import layout, manifest, write_plan
from rollcall.train.checkpoint.contents import Damaged
from rollcall.train.checkpoint.engine import Engine, Hooks
from rollcall.train.checkpoint.store import CheckpointStore
from rollcall.train.checkpoint.tools import export
from rollcall.train.ranks.world import World

DAMAGE: list[Callable[[Path], None]] = [cut, empty, flip, Path.unlink]


def test_a_state_comes_back(world: World, saved: Path) -> None:
    checkpoints = Engine(CheckpointStore(saved, world))
    found = restored(checkpoints, state(0))
    assert found is not None and found[0] == 2
    assert_same(found[1], state(2))
    exported = export.read(layout.path_of(saved, 1))
    exported["optim"]["betas"] = tuple(exported["optim"]["betas"])
    assert_same(exported, state(1))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_changes_after_the_call_is_not_saved(
    world: World, tmp_path: Path, device: str
) -> None:
    """The way of a GPU, a buffer and a thread, works on tensors of the host, too."""
    checkpoints = Engine(CheckpointStore(tmp_path, World(world.place, torch.device(device))))
    live = state(3)
    checkpoints.begin(3, live)
    for tensor in live["model"].values():
        tensor.zero_()
    outcome = checkpoints.drain()
    assert outcome is not None and not outcome.problem
    found = restored(checkpoints, state(0))
    assert found is not None
    assert_same(found[1], state(3))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_complex_numbers_come_back_and_are_compared(
    world: World, tmp_path: Path, device: str
) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    checkpoints = Engine(CheckpointStore(tmp_path, World(world.place, torch.device(device))))
    # What torch conjugates when it is read next, as a buffer of a model may be.
    save(checkpoints, 1, {"x": numbers.conj(), "lr": math.nan})
    save(checkpoints, 2, {"x": torch.tensor([1 - 2j, 3 + 9j]), "lr": math.nan})
    found = {"x": torch.zeros(2, dtype=torch.complex64), "lr": 0.0}
    checkpoints.load(1, found)
    assert torch.equal(found["x"], torch.tensor([1 - 2j, 3 + 4j]))  # type: ignore[arg-type]
    lines = differences(layout.path_of(tmp_path, 1), layout.path_of(tmp_path, 2))
    assert lines == ["x: 1 of 2 numbers differ, by 5 at most"]


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.bin"])
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_found_and_the_one_before_is_used(
    world: World, copied: Path, file: str, damage: Callable[[Path], None]
) -> None:
    damage(layout.path_of(copied, 2) / file)
    refused = []
    checkpoints = Engine(
        CheckpointStore(copied, world), Hooks(on_refusal=lambda *each: refused.append(each))
    )
    found = restored(checkpoints, state(0))
    assert found is not None and found[0] == 1
    assert_same(found[1], state(1))
    [(step, problem)] = refused
    assert step == 2 and file in problem
    assert sorted(path.name for path in copied.iterdir()) == [
        "damaged-step-00000002",
        "step-00000001",
    ]


def test_a_checkpoint_in_the_place_of_another_step_is_refused(world: World, copied: Path) -> None:
    """Otherwise training would resume at the wrong step, with its samples and learning rate."""
    layout.path_of(copied, 2).rename(layout.path_of(copied, 7))
    refused = []
    checkpoints = Engine(
        CheckpointStore(copied, world), Hooks(on_refusal=lambda *each: refused.append(each))
    )
    found = restored(checkpoints, state(0))
    assert found is not None and found[0] == 1
    assert refused == [(7, "manifest.json belongs to step 2")]


@needs_root
def test_a_damaged_one_that_cannot_be_moved_lets_no_whole_one_go(
    world: World, copied: Path
) -> None:
    with mounted(layout.path_of(copied, 9), "tmpfs", "1m"):  # which cannot be renamed
        checkpoints = Engine(CheckpointStore(copied, world, keep=1))
        found = restored(checkpoints, state(0))
        assert found is not None and found[0] == 2
        checkpoints.store.retire()
        assert sorted(layout.published(copied)) == [2, 9]
        save(checkpoints, 4, state(4))
        assert sorted(layout.published(copied)) == [4, 9]


def test_every_bit_of_a_manifest_counts(saved: Path) -> None:
    data = (layout.path_of(saved, 2) / manifest.NAME).read_bytes()
    for place in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(Damaged):
            manifest.parse(bytes(damaged), saved)


def test_nothing_whole_is_refused_and_nothing_deleted(world: World, copied: Path) -> None:
    for step in (1, 2):
        flip(layout.path_of(copied, step) / "rank-00000.bin")
    before = sorted(path.stat().st_ino for path in copied.rglob("*"))
    for _ in range(2):  # the second attempt must not start from step 0 either
        with pytest.raises(ConfigError, match="no intact checkpoint: damaged-step-00000001, dam"):
            restored(Engine(CheckpointStore(copied, world)), state(0))
    assert sorted(path.stat().st_ino for path in copied.rglob("*")) == before
    store = CheckpointStore(copied, world)
    assert "could not be set aside" in store.refuse(7)
    with pytest.raises(ConfigError, match="damaged-step-00000002, step-00000007; nothing was"):
        store.check_fresh_start()


def test_other_versions_and_models_are_refused_in_words(world: World, copied: Path) -> None:
    newest = layout.path_of(copied, 2)
    whole = (newest / manifest.NAME).read_bytes()
    (newest / manifest.NAME).write_text('{"format": 1, "torch": "2.11.0", "step": 2}\n')
    with pytest.raises(ConfigError, match="by an earlier version of rollcall"):
        restored(Engine(CheckpointStore(copied, world)), state(0))
    (newest / manifest.NAME).write_bytes(whole)
    other = state(0)
    other["model"]["scalar"] = torch.zeros(2)
    with pytest.raises(ConfigError, match=r"model.scalar has the shape \[\], not \[2\]"):
        restored(Engine(CheckpointStore(copied, world)), other)
    other["model"]["more"] = other["model"].pop("scalar")
    with pytest.raises(ConfigError, match=r"it has no tensor model\.more"):
        restored(Engine(CheckpointStore(copied, world)), other)
    assert newest.exists()


def rename_file(fields: dict[str, Any], name: str) -> None:
    [size] = fields["files"].values()
    fields["files"] = {name: size}
    for entry in fields["tensors"]:
        for piece in entry["pieces"]:
            piece["file"] = name


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "path above": lambda fields: rename_file(fields, "../step-00000001/rank-00000.bin"),
    "absolute path": lambda fields: rename_file(fields, "/etc/passwd"),
    "huge shape": lambda fields: entry_of(fields, "weight").update(shape=[2**50, 2**10]),
    "shape that overflows": lambda fields: entry_of(fields, "empty").update(
        shape=[2**62, 0, 2**62]
    ),
    "shape of lists": lambda fields: entry_of(fields, "weight").update(shape=[[300], 200]),
    "negative": lambda fields: entry_of(fields, "weight").update(shape=[-300, -200]),
    "truth as number": lambda fields: entry_of(fields, "weight").update(shape=[True, 60_000]),
    "many dimensions": lambda fields: entry_of(fields, "scalar").update(shape=[1] * 1000),
    "unknown type": lambda fields: entry_of(fields, "weight").update(dtype="nn.Module"),
    "behind the end": lambda fields: entry_of(fields, "half")["pieces"][0].update(start=2**40),
    "outside": lambda fields: entry_of(fields, "half")["pieces"][0].update(offset=[1]),
    "piece twice": lambda fields: entry_of(fields, "weight")["pieces"][1].update(offset=[0, 0]),
    "tensor without bytes": lambda fields: fields["tensors"].append(
        {"key": ["x"], "dtype": "float64", "shape": [2**40], "pieces": []}
    ),
    "bytes used twice": lambda fields: fields["tensors"].append(
        entry_of(fields, "weight") | {"key": ["model", "again"]}
    ),
    "no facts": lambda fields: fields.pop("facts"),
    "step is text": lambda fields: fields["facts"].update(step="2"),
    "key through a tensor": lambda fields: fields["values"].append([["model", "weight", "x"], 1]),
    "key through a value": lambda fields: fields["values"].append([["optim", "lr", "x"], 1]),
    "endless list": lambda fields: fields["values"].append([["objects", 2**40], 1]),
    "negative entry": lambda fields: fields["values"].append([["objects", -1], 1]),
    "list with names": lambda fields: fields["values"].extend(
        [[["objects", 0], 1], [["objects", "x"], 1]]
    ),
    "state that is a list": lambda fields: fields["values"].append([[0, "x"], 1]),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_strangers_manifest_is_not_believed(copied: Path, name: str) -> None:
    path = layout.path_of(copied, 2)
    forge(path / manifest.NAME, FORGERIES[name])
    with pytest.raises(Damaged):
        manifest.read(path)


def test_a_bomb_of_brackets_is_not_a_manifest(saved: Path) -> None:
    with pytest.raises(Damaged):
        manifest.parse(b"[" * 1_000_000, saved)
    with pytest.raises(Damaged):
        manifest.parse(b'{"format": ' + b"9" * 10_000 + b"}", saved)


class Attack:
    """Runs a command when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.proof),)


def test_no_file_is_unpickled(world: World, copied: Path, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    planted = pickle.dumps(Attack(proof))
    newest = layout.path_of(copied, 2)
    for name in (".metadata", "__0_0.distcp", "rank-00000.json", "state.pt"):
        (newest / name).write_bytes(planted)
    assert restored(Engine(CheckpointStore(copied, world)), state(0)) is not None
    export.read(newest)
    for path in newest.iterdir():
        path.write_bytes(planted)
    found = restored(Engine(CheckpointStore(copied, world)), state(0))
    assert found is not None and found[0] == 1
    assert not proof.exists()


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.bin"])
@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_only_regular_files_are_read(copied: Path, name: str, kind: str) -> None:
    path = layout.path_of(copied, 2)
    (path / name).rename(path / "elsewhere")
    if kind == "link":
        (path / name).symlink_to(path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path / name)
    else:
        (path / name).mkdir()
    with pytest.raises(Damaged, match=name):
        export.read(path)


def test_files_belong_to_the_user_alone_whatever_umask_is_set(world: World, tmp_path: Path) -> None:
    before = os.umask(0o777)
    try:
        save(Engine(CheckpointStore(tmp_path, world)), 1, state(1), samples=64)
    finally:
        os.umask(before)
    directory = layout.path_of(tmp_path, 1)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}


def test_left_overs_of_the_dead_go_and_those_of_the_living_stay(
    world: World, tmp_path: Path
) -> None:
    living = layout.unpublished(tmp_path, 3, layout.owner())
    host = living.name.split("-", 2)[2].rsplit("-", 2)[0]
    dead = tmp_path / f".saving-00000004-{host}-{2**22 + 1}-0123abcd"
    elsewhere = tmp_path / ".saving-00000005-another-host-17-0123abcd"
    forgotten = tmp_path / ".saving-00000006-another-host-17-0123abcd"
    replaced = tmp_path / ".replaced-step-00000007"
    retired = tmp_path / ".retired-step-00000001"
    for path in (living, dead, elsewhere, forgotten, replaced, retired):
        path.mkdir()
    os.utime(forgotten, (0, 0))
    Engine(CheckpointStore(tmp_path, world)).clean()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {living.name, elsewhere.name, "step-00000007"}


def test_what_stays() -> None:
    steps = range(10, 101, 10)
    assert layout.stale(steps, 2, None, None) == [10, 20, 30, 40, 50, 60, 70, 80]
    assert layout.stale(steps, 1, 30, 20) == [10, 40, 50, 70, 80]
    assert layout.stale([5], 1, None, None) == []


def test_what_is_being_read_stays(world: World, tmp_path: Path) -> None:
    checkpoints = Engine(CheckpointStore(tmp_path, world, keep=1))
    save(checkpoints, 1, {"x": torch.ones(1)})
    with layout.reading(layout.path_of(tmp_path, 1)):
        save(checkpoints, 2, {"x": torch.ones(1)})
        assert sorted(layout.published(tmp_path)) == [1, 2]
    save(checkpoints, 3, {"x": torch.ones(1)})
    assert sorted(layout.published(tmp_path)) == [3]


def test_boxes_are_spread_over_those_who_hold_them() -> None:
    everywhere = dict.fromkeys(range(8), 10)
    shares = write_plan.divide([everywhere | {100: 40}, everywhere, everywhere])
    assert sorted(box for share in shares for box in share) == [*range(8), 100]
    assert 100 in shares[0] and [len(share) for share in shares] == [1, 4, 4]
