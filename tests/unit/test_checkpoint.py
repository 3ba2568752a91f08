"""What a checkpoint promises, and what it does not believe of another's."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from disks import mounted, needs_root, until

from train.__main__ import main
from train.checkpoint import (
    Checkpointer,
    export,
    interval,
    manifest,
    plan,
    saver,
    shelf,
    text,
    verify,
    write,
)
from train.checkpoint.compare import differences
from train.checkpoint.manifest import Damaged
from train.config import ConfigError, parse
from train.deadline import Deadline
from train.run import RunDir, read_lines
from train.world import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World.join("cpu")
    yield world
    world.leave()


def state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(300, 200, generator=generator),  # two pieces
            "transposed": torch.randn(7, 5, generator=generator).t(),
            "scalar": torch.randn((), generator=generator),
            "empty": torch.empty(0, 3),
            "half": torch.randn(9, generator=generator).bfloat16(),
            "mask": torch.arange(11) > seed,
        },
        "optim": {"lr": 0.1 * seed, "betas": (0.9, 0.999), "foreach": None, "fused": False},
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, tensor in expected["model"].items():
        assert found["model"][name].dtype == tensor.dtype
        assert torch.equal(found["model"][name], tensor), name
    assert found["optim"] == expected["optim"]


@pytest.fixture(scope="module")
def saved(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    checkpoints = Checkpointer(directory, world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "PIECE", 2**17)
        for step in (1, 2):
            checkpoints.save(step, state(step), samples=64 * step)
    return directory


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: list[Callable[[Path], None]] = [cut, empty, flip, Path.unlink]


def test_a_state_comes_back(world: World, saved: Path) -> None:
    checkpoints = Checkpointer(saved, world)
    found = checkpoints.restore(lambda: state(0))
    assert found is not None and found[0] == 2
    assert_same(found[1], state(2))
    exported = export.read(shelf.place(saved, 1))
    exported["optim"]["betas"] = tuple(exported["optim"]["betas"])
    assert_same(exported, state(1))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_changes_after_the_call_is_not_saved(
    world: World, tmp_path: Path, device: str
) -> None:
    """The way of a GPU, a buffer and a thread, works on tensors of the host, too."""
    checkpoints = Checkpointer(tmp_path, World(world.place, torch.device(device)))
    live = state(3)
    checkpoints.begin(3, live)
    for tensor in live["model"].values():
        tensor.zero_()
    outcome = checkpoints.drain()
    assert outcome is not None and not outcome.problem
    found = checkpoints.restore(lambda: state(0))
    assert found is not None
    assert_same(found[1], state(3))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_complex_numbers_come_back_and_are_compared(
    world: World, tmp_path: Path, device: str
) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    checkpoints = Checkpointer(tmp_path, World(world.place, torch.device(device)))
    # What torch conjugates when it is read next, as a buffer of a model may be.
    checkpoints.save(1, {"x": numbers.conj(), "lr": math.nan})
    checkpoints.save(2, {"x": torch.tensor([1 - 2j, 3 + 9j]), "lr": math.nan})
    found = {"x": torch.zeros(2, dtype=torch.complex64), "lr": 0.0}
    checkpoints.load(1, found)
    assert torch.equal(found["x"], torch.tensor([1 - 2j, 3 + 4j]))  # type: ignore[arg-type]
    lines = differences(shelf.place(tmp_path, 1), shelf.place(tmp_path, 2))
    assert lines == ["x: 1 of 2 numbers differ, by 5 at most"]


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.bin"])
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_found_and_the_one_before_is_used(
    world: World, copied: Path, file: str, damage: Callable[[Path], None]
) -> None:
    damage(shelf.place(copied, 2) / file)
    refused = []
    checkpoints = Checkpointer(copied, world)
    checkpoints.on_refusal = lambda step, problem: refused.append((step, problem))
    found = checkpoints.restore(lambda: state(0))
    assert found is not None and found[0] == 1
    assert_same(found[1], state(1))
    [(step, problem)] = refused
    assert step == 2 and file in problem
    assert sorted(path.name for path in copied.iterdir()) == [
        "damaged-step-00000002",
        "step-00000001",
    ]


def test_a_checkpoint_in_the_place_of_another_step_is_refused(world: World, copied: Path) -> None:
    """Else its state would go on with the samples and the learning rate of that step."""
    shelf.place(copied, 2).rename(shelf.place(copied, 7))
    refused = []
    checkpoints = Checkpointer(copied, world)
    checkpoints.on_refusal = lambda step, problem: refused.append((step, problem))
    found = checkpoints.restore(lambda: state(0))
    assert found is not None and found[0] == 1
    assert refused == [(7, "manifest.json is that of step 2")]


@needs_root
def test_a_damaged_one_that_cannot_be_moved_lets_no_whole_one_go(
    world: World, copied: Path
) -> None:
    with mounted(shelf.place(copied, 9), "tmpfs", "1m"):  # which cannot be renamed
        checkpoints = Checkpointer(copied, world, keep=1)
        found = checkpoints.restore(lambda: state(0))
        assert found is not None and found[0] == 2
        checkpoints.retire()
        assert sorted(shelf.published(copied)) == [2, 9]
        checkpoints.save(4, state(4))
        assert sorted(shelf.published(copied)) == [4, 9]


def test_every_bit_of_a_manifest_counts(saved: Path) -> None:
    data = (shelf.place(saved, 2) / manifest.NAME).read_bytes()
    for place in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(Damaged):
            text.parse(bytes(damaged), saved)


def test_nothing_whole_is_refused_and_nothing_deleted(world: World, copied: Path) -> None:
    for step in (1, 2):
        flip(shelf.place(copied, step) / "rank-00000.bin")
    before = sorted(path.stat().st_ino for path in copied.rglob("*"))
    for _ in range(2):  # the second attempt must not start afresh either
        with pytest.raises(ConfigError, match="no whole checkpoint: damaged-step-00000001, dam"):
            Checkpointer(copied, world).restore(lambda: state(0))
    assert sorted(path.stat().st_ino for path in copied.rglob("*")) == before


def test_other_versions_and_models_are_refused_in_words(world: World, copied: Path) -> None:
    newest = shelf.place(copied, 2)
    whole = (newest / manifest.NAME).read_bytes()
    (newest / manifest.NAME).write_text('{"format": 1, "torch": "2.11.0", "step": 2}\n')
    with pytest.raises(ConfigError, match="by an earlier version of rollcall"):
        Checkpointer(copied, world).restore(lambda: state(0))
    (newest / manifest.NAME).write_bytes(whole)
    other = state(0)
    other["model"]["scalar"] = torch.zeros(2)
    with pytest.raises(ConfigError, match=r"model.scalar has the shape \[\], not \[2\]"):
        Checkpointer(copied, world).restore(lambda: other)
    other["model"]["more"] = other["model"].pop("scalar")
    with pytest.raises(ConfigError, match=r"it has no tensor model\.more"):
        Checkpointer(copied, world).restore(lambda: other)
    assert newest.exists()


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a manifest that says what we want, with the digest that belongs to it."""
    fields = json.loads(path.read_bytes())
    del fields["crc32"]
    change(fields)
    body = json.dumps(fields, separators=(",", ":"))[:-1].encode()
    path.write_bytes(body + b',"crc32":"%08x"}\n' % zlib.crc32(body))


def tensor(fields: dict[str, Any], name: str) -> Any:
    return next(entry for entry in fields["tensors"] if entry["key"][-1] == name)


def rename_file(fields: dict[str, Any], name: str) -> None:
    [size] = fields["files"].values()
    fields["files"] = {name: size}
    for entry in fields["tensors"]:
        for piece in entry["pieces"]:
            piece["file"] = name


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "path above": lambda fields: rename_file(fields, "../step-00000001/rank-00000.bin"),
    "absolute path": lambda fields: rename_file(fields, "/etc/passwd"),
    "huge shape": lambda fields: tensor(fields, "weight").update(shape=[2**50, 2**10]),
    "shape that overflows": lambda fields: tensor(fields, "empty").update(shape=[2**62, 0, 2**62]),
    "shape of lists": lambda fields: tensor(fields, "weight").update(shape=[[300], 200]),
    "negative": lambda fields: tensor(fields, "weight").update(shape=[-300, -200]),
    "truth as number": lambda fields: tensor(fields, "weight").update(shape=[True, 60_000]),
    "many dimensions": lambda fields: tensor(fields, "scalar").update(shape=[1] * 1000),
    "unknown type": lambda fields: tensor(fields, "weight").update(dtype="nn.Module"),
    "behind the end": lambda fields: tensor(fields, "half")["pieces"][0].update(start=2**40),
    "outside": lambda fields: tensor(fields, "half")["pieces"][0].update(offset=[1]),
    "piece twice": lambda fields: tensor(fields, "weight")["pieces"][1].update(offset=[0, 0]),
    "tensor without bytes": lambda fields: fields["tensors"].append(
        {"key": ["x"], "dtype": "float64", "shape": [2**40], "pieces": []}
    ),
    "bytes used twice": lambda fields: fields["tensors"].append(
        tensor(fields, "weight") | {"key": ["model", "again"]}
    ),
    "no facts": lambda fields: fields.pop("facts"),
    "step is text": lambda fields: fields["facts"].update(step="2"),
    "key through a tensor": lambda fields: fields["values"].append([["model", "weight", "x"], 1]),
    "key through a value": lambda fields: fields["values"].append([["optim", "lr", "x"], 1]),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_strangers_manifest_is_not_believed(copied: Path, name: str) -> None:
    path = shelf.place(copied, 2)
    forge(path / manifest.NAME, FORGERIES[name])
    with pytest.raises(Damaged):
        manifest.read(path)


def test_a_bomb_of_brackets_is_not_a_manifest(saved: Path) -> None:
    with pytest.raises(Damaged):
        text.parse(b"[" * 1_000_000, saved)
    with pytest.raises(Damaged):
        text.parse(b'{"format": ' + b"9" * 10_000 + b"}", saved)


class Attack:
    """Runs a command when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.proof),)


def test_no_file_is_unpickled(world: World, copied: Path, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    planted = pickle.dumps(Attack(proof))
    newest = shelf.place(copied, 2)
    for name in (".metadata", "__0_0.distcp", "rank-00000.json", "state.pt"):
        (newest / name).write_bytes(planted)
    assert Checkpointer(copied, world).restore(lambda: state(0)) is not None
    export.read(newest)
    for path in newest.iterdir():
        path.write_bytes(planted)
    found = Checkpointer(copied, world).restore(lambda: state(0))
    assert found is not None and found[0] == 1
    assert not proof.exists()


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.bin"])
@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_only_regular_files_are_read(copied: Path, name: str, kind: str) -> None:
    path = shelf.place(copied, 2)
    (path / name).rename(path / "elsewhere")
    if kind == "link":
        (path / name).symlink_to(path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path / name)
    else:
        (path / name).mkdir()
    with pytest.raises(Damaged, match=name):
        export.read(path)


def test_left_overs_of_the_dead_go_and_those_of_the_living_stay(
    world: World, tmp_path: Path
) -> None:
    living = shelf.beside(tmp_path, 3, shelf.owner())
    host = living.name.split("-", 2)[2].rsplit("-", 2)[0]
    dead = tmp_path / f".saving-00000004-{host}-{2**22 + 1}-0123abcd"
    elsewhere = tmp_path / ".saving-00000005-another-host-17-0123abcd"
    forgotten = tmp_path / ".saving-00000006-another-host-17-0123abcd"
    replaced = tmp_path / ".replaced-step-00000007"
    retired = tmp_path / ".retired-step-00000001"
    for path in (living, dead, elsewhere, forgotten, replaced, retired):
        path.mkdir()
    os.utime(forgotten, (0, 0))
    Checkpointer(tmp_path, world).clean()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {living.name, elsewhere.name, "step-00000007"}


def test_what_stays() -> None:
    steps = range(10, 101, 10)
    assert shelf.stale(steps, 2, None, None) == [10, 20, 30, 40, 50, 60, 70, 80]
    assert shelf.stale(steps, 1, 30, 20) == [10, 40, 50, 70, 80]
    assert shelf.stale([5], 1, None, None) == []


def test_what_is_being_read_stays(world: World, tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path, world, keep=1)
    checkpoints.save(1, {"x": torch.ones(1)})
    with shelf.reading(shelf.place(tmp_path, 1)):
        checkpoints.save(2, {"x": torch.ones(1)})
        assert sorted(shelf.published(tmp_path)) == [1, 2]
    checkpoints.save(3, {"x": torch.ones(1)})
    assert sorted(shelf.published(tmp_path)) == [3]


def test_boxes_are_spread_over_those_who_hold_them() -> None:
    everywhere = dict.fromkeys(range(8), 10)
    shares = plan.divide([everywhere | {100: 40}, everywhere, everywhere])
    assert sorted(box for share in shares for box in share) == [*range(8), 100]
    assert 100 in shares[0] and [len(share) for share in shares] == [1, 4, 4]


def test_interval_follows_from_cost_and_failures() -> None:
    hour = 3600
    assert interval.best(5, 8 * hour) == pytest.approx(math.sqrt(2 * 5 * 8 * hour), rel=0.01)
    assert interval.best(3 * hour, hour) == hour
    assert interval.between_failures([], hour) == hour
    events = [
        {"event": "started", "time": 0},
        {"event": "first_step", "time": 1 * hour},  # killed
        {"event": "started", "time": 5 * hour},
        {"event": "finished", "time": 6 * hour},  # asked to stop
    ]
    assert interval.between_failures(events, 10 * hour) == (10 + 1 + 1) * hour / 2
    events.append({"event": "started", "time": 99 * hour})
    events.append({"event": "first_step", "time": 3 * hour})  # the clock was wrong before
    assert interval.between_failures(events, 10 * hour) == (10 + 1 + 1) * hour / 3


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main(["checkpoint", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_commands_list_and_show(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = command(capsys, "list", saved)
    assert code == 0 and [line.split()[0] for line in output.splitlines()[1:]] == ["step", "1", "2"]
    code, output = command(capsys, "show", saved)
    assert code == 0 and "model.weight: float32 300×200, 2 pieces" in output
    assert "samples: 128" in output and "betas = [0.9, 0.999]" in output
    code, output = command(capsys, "convert", saved)
    assert code == 0 and "Nothing is to be converted" in output
    code, output = command(capsys, "show", saved / "nothing")
    assert code == 2 and "there is no such run or checkpoint" in output


def test_command_verify_names_every_damaged_file(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(capsys, "verify", copied)[0] == 0
    flip(shelf.place(copied, 1) / "rank-00000.bin")
    cut(shelf.place(copied, 2) / "manifest.json")
    code, output = command(capsys, "verify", copied)
    assert code == 1
    assert "step-00000001: damaged\n  rank-00000.bin is not what was written: model.wei" in output
    assert "step-00000002: damaged\n  manifest.json is not what was written" in output


def test_what_is_being_verified_stays_and_what_has_gone_is_not_damaged(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = verify._crc32

    def retire(descriptor: int, start: int, size: int) -> int:
        for path in shelf.published(copied).values():
            shelf.retire(path)
        return digest(descriptor, start, size)

    monkeypatch.setattr(verify, "_crc32", retire)
    code, output = command(capsys, "verify", copied)
    assert (code, output) == (0, f"{shelf.place(copied, 1)}: whole\n")


def test_a_strangers_facts_do_not_reach_the_terminal(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shelf.place(copied, 2)
    facts = {"torch": "\x1b[2J", "time": 1e300, "metrics": {"\x1b[2J": 10**400}}
    forge(path / manifest.NAME, lambda fields: fields["facts"].update(facts))
    code, output = command(capsys, "list", copied)
    assert code == 0 and "\ufffd[2J" in output and "\x1b" not in output
    forge(path / manifest.NAME, lambda fields: tensor(fields, "half").update(dtype="\x1b[2J"))
    code, output = command(capsys, "show", path)
    assert code == 2 and f"{path} is damaged: manifest.json promises" in output
    assert "\x1b" not in output


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_that_are_not_there_are_not_exported(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    Checkpointer(tmp_path, world).save(1, {"x": torch.ones(2)})
    target = tmp_path / f"weights{suffix}"
    code, output = command(capsys, "export", tmp_path, target)
    assert code == 2 and "holds no tensor under model: --all exports" in output
    assert not target.exists()
    assert command(capsys, "export", tmp_path, target, "--all")[0] == 0


def test_command_diff_names_what_differs(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = shelf.place(saved, 1), shelf.place(saved, 2)
    assert command(capsys, "diff", one, one) == (
        0,
        "every tensor and value is equal to the last bit\n",
    )
    code, output = command(capsys, "diff", one, two)
    assert code == 1
    assert output.startswith("model.weight: 60000 of 60000 numbers differ, by ")
    assert "model.mask: 1 of 11 numbers differ, by 1 at most" in output
    assert "optim.lr: 0.1 and 0.2" in output and "empty" not in output


def test_command_export_writes_what_others_read(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(capsys, "export", saved, tmp_path / "w.pt")[0] == 0
    assert command(capsys, "export", saved, tmp_path / "w.safetensors")[0] == 0
    expected = state(2)["model"]
    weights = torch.load(tmp_path / "w.pt", weights_only=True)
    data = (tmp_path / "w.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert size % 8 == 0 and header.pop("__metadata__")["step"] == "2"
    assert weights.keys() == header.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor)
        first, last = header[name]["data_offsets"]
        raw = data[8 + size + first : 8 + size + last]
        assert raw == bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        assert header[name]["shape"] == list(tensor.shape)
    code, output = command(capsys, "export", saved, tmp_path / "w.onnx")
    assert code == 2 and "expected a name that ends in .safetensors or .pt" in output


@pytest.mark.parametrize("words", [["list"], ["show"], ["verify"], ["convert"]])
def test_commands_answer_without_torch(saved: Path, words: list[str]) -> None:
    check = "import sys; from train.__main__ import main; code = main(sys.argv[1:]); "
    check += "assert 'torch' not in sys.modules; sys.exit(code)"
    process = [sys.executable, "-c", check, "checkpoint", *words, str(saved)]
    assert subprocess.run(process, stdout=subprocess.DEVNULL, timeout=60).returncode == 0


def test_a_disk_that_takes_no_more_costs_one_checkpoint(world: World, tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path, world)
    checkpoints.save(1, state(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        checkpoints.begin(2, state(2))
        outcome = checkpoints.drain()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert outcome is not None and "File too large" in outcome.problem
    checkpoints.save(3, state(3))
    assert sorted(shelf.published(tmp_path)) == [1, 3]
    deadline = time.monotonic() + 60  # a thread removes what was written
    while any(path.name.startswith(".") for path in tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stopped(
    *words: Any, write_part: Callable[..., object] = write.write_part, **named: Any
) -> None:
    """Write a part when somebody lets this process go on."""
    os.kill(os.getpid(), signal.SIGSTOP)
    write_part(*words, **named)


def test_a_disk_that_does_not_answer_is_given_up(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpointer(tmp_path, world)
    checkpoints.save(1, state(1))
    before = set(psutil.Process().children())
    monkeypatch.setattr(write, "write_part", stopped)
    checkpoints.begin(2, state(2))
    [writer] = set(psutil.Process().children()) - before
    assert checkpoints.wait(0.1) is None and checkpoints.busy
    outcome = checkpoints.drain(0.1)
    assert outcome and re.fullmatch(r"it was not on disk after \d+ s", outcome.problem)
    assert not checkpoints.busy and sorted(shelf.published(tmp_path)) == [1]
    writer.wait(60)


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_writer_that_dies_costs_one_checkpoint(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: signal.Handlers
) -> None:
    """Also in a process that ignores its children, as its parent may have left it."""
    previous = signal.signal(signal.SIGCHLD, handler)
    try:
        checkpoints = Checkpointer(tmp_path, world)
        before = set(psutil.Process().children())
        with monkeypatch.context() as patch:
            patch.setattr(write, "write_part", stopped)
            checkpoints.begin(1, {"x": torch.ones(2)})
        [writer] = set(psutil.Process().children()) - before
        writer.kill()
        outcome = checkpoints.drain()
        assert outcome is not None and "the writing process ended with" in outcome.problem
        checkpoints.save(2, {"x": torch.ones(2)})
    finally:
        signal.signal(signal.SIGCHLD, previous)


def test_who_stops_the_job_does_not_stop_the_save(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpointer(tmp_path, world)
    before = set(psutil.Process().children())
    monkeypatch.setattr(write, "write_part", stopped)
    checkpoints.begin(1, state(1))
    [writer] = set(psutil.Process().children()) - before
    until(lambda: writer.status() == psutil.STATUS_STOPPED)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        writer.send_signal(number)
    writer.resume()
    outcome = checkpoints.drain()
    assert outcome is not None and not outcome.problem


def test_auto_saves_at_the_interval_that_follows(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "FIRST", 0.0)
    monkeypatch.setattr(saver, "SHARE", 0.5)  # a disk that takes seconds is waited for twice that
    words = ["checkpoint.auto=true", "checkpoint.every=null", "checkpoint.failure_hours=1e-6"]
    run_dir = RunDir(tmp_path, "auto")
    run_dir.create()
    deadline = Deadline(run_dir.job)
    saves = saver.Saver(parse(words)[1], world, run_dir, lambda: {"x": torch.ones(9)}, deadline)
    assert saves.resume() is None
    steps: list[float] = []
    began = time.monotonic()
    while len(steps) < 3:
        saves.settle([float(flag) for flag in saves.flags()])
        if saves.is_due(len(steps) + 1):
            steps.append(time.monotonic())
            saves.begin(len(steps))
        assert time.monotonic() < began + 60
    saves.close()
    told = [line for line in read_lines(run_dir.events) if line["event"] == "checkpointed"]
    assert [line["step"] for line in told] == [1, 2, 3]
    # Failures are assumed so often that it is the share of saving that bounds the interval.
    assert steps[2] - steps[1] > told[1]["seconds"] / saver.SHARE - 0.01


def test_an_old_one_of_another_version_hinders_no_search_for_the_best(
    world: World, copied: Path
) -> None:
    (shelf.place(copied, 1) / manifest.NAME).write_text('{"format": 1, "step": 1}\n')
    run_dir = RunDir(copied.parent, ".")  # whose checkpoints they are
    _, config = parse(["checkpoint.best=loss"])
    saves = saver.Saver(config, world, run_dir, lambda: state(0), Deadline(run_dir.job))
    found = saves.resume()
    assert found is not None and found[0] == 2


def test_an_attempt_that_lost_the_run_publishes_nothing(world: World, tmp_path: Path) -> None:
    def check() -> None:
        raise PermissionError("another attempt has the run")

    checkpoints = Checkpointer(tmp_path, world)
    checkpoints.before_publishing = check
    with pytest.raises(OSError, match="another attempt has the run"):
        checkpoints.save(1, state(1))
    assert not shelf.published(tmp_path)
