"""`python -m train checkpoint`: what it shows, and what it makes of a stranger's checkpoint."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import cut, entry_of, flip, forge, save, state

from rollcall.train.checkpoint import layout, manifest
from rollcall.train.checkpoint.engine import Engine
from rollcall.train.checkpoint.store import CheckpointStore
from rollcall.train.checkpoint.tools import export, verify
from rollcall.train.main import main
from rollcall.train.ranks.world import World


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
    code, output = command(capsys, "show", saved / "nothing")
    assert code == 2 and "no such run or checkpoint" in output


def test_command_verify_names_every_damaged_file(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(capsys, "verify", copied)[0] == 0
    flip(layout.path_of(copied, 1) / "rank-00000.bin")
    cut(layout.path_of(copied, 2) / "manifest.json")
    code, output = command(capsys, "verify", copied)
    assert code == 1
    assert "step-00000001: damaged\n  rank-00000.bin is not what was written: model.wei" in output
    assert "step-00000002: damaged\n  manifest.json is not what was written" in output


def test_what_is_being_verified_stays_and_what_has_gone_is_not_damaged(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = verify._crc32

    def retire(descriptor: int, start: int, size: int) -> int:
        for path in layout.published(copied).values():
            layout.retire(path)
        return digest(descriptor, start, size)

    monkeypatch.setattr(verify, "_crc32", retire)
    code, output = command(capsys, "verify", copied)
    assert (code, output) == (0, f"{layout.path_of(copied, 1)}: intact\n")


def test_a_strangers_facts_do_not_reach_the_terminal(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = layout.path_of(copied, 2)
    facts = {"torch": "\x1b[2J", "time": 1e300, "metrics": {"\x1b[2J": 10**400}}
    forge(path / manifest.NAME, lambda fields: fields["facts"].update(facts))
    code, output = command(capsys, "export", copied, copied / "w.pt", "--best")
    assert code == 2 and "no checkpoint has a validation" in output
    forge(path / manifest.NAME, lambda fields: fields["facts"].update(config=1, metrics=[1]))
    assert command(capsys, "export", copied, copied / "w.pt", "--best")[0] == 2
    forge(path / manifest.NAME, lambda fields: fields["facts"].update(hugging_face={"x": 1}))
    assert command(capsys, "export", copied, copied / "w", "--format", "hf")[0] == 0
    part = {"checkpoint": {"save_frozen": False}, "model": {"freeze": "embed*"}}
    forge(path / manifest.NAME, lambda fields: fields["facts"].update(config=part))
    code, output = command(capsys, "export", copied, copied / "part", "--format", "hf")
    assert code == 2 and "holds only what was trained (checkpoint.save_frozen=false)" in output
    forge(path / manifest.NAME, lambda fields: fields["facts"].update(facts))
    code, output = command(capsys, "list", copied)
    assert code == 0 and "\ufffd[2J" in output and "\x1b" not in output
    forge(path / manifest.NAME, lambda fields: entry_of(fields, "half").update(dtype="\x1b[2J"))
    code, output = command(capsys, "show", path)
    assert code == 2 and f"{path} is damaged: manifest.json is not valid" in output
    assert "\x1b" not in output


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_that_are_not_there_are_not_exported(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    save(Engine(CheckpointStore(tmp_path, world)), 1, {"x": torch.ones(2)})
    target = tmp_path / f"weights{suffix}"
    code, output = command(capsys, "export", tmp_path, target)
    assert code == 2 and "holds no tensor under model; --all exports" in output
    assert not target.exists()
    assert command(capsys, "export", tmp_path, target, "--all")[0] == 0


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
    for place in (tmp_path, tmp_path / "none" / "w.pt"):
        code, output = command(capsys, "export", saved, place)
        assert code == 2 and output.endswith(
            f"error: {place}: expected a new name in a folder that exists\n"
        )
    code, output = command(capsys, "export", saved, tmp_path / "w.onnx")
    assert code == 2 and "expected a name that ends in .safetensors or .pt" in output


@pytest.mark.parametrize("words", [["list"], ["show"], ["verify"]])
def test_commands_answer_without_torch(saved: Path, words: list[str]) -> None:
    check = "import sys; from rollcall.train.main import main; code = main(sys.argv[1:]); "
    check += "assert 'torch' not in sys.modules; sys.exit(code)"
    process = [sys.executable, "-c", check, "checkpoint", *words, str(saved)]
    assert subprocess.run(process, stdout=subprocess.DEVNULL, timeout=500).returncode == 0


def test_an_error_of_the_disk_is_told(
    copied: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export, "view", fail)
    target = tmp_path / "weights.safetensors"
    code, output = command(capsys, "export", copied, target)
    assert code == 2
    assert output.startswith(f"rollcall: error: {target}: No space left on device; free some space")
