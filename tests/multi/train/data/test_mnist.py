"""The real loading code on small files in MNIST's format; nothing is downloaded."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from ranks import Ranks, train

FILES = {"train": 256, "t10k": 50}


@pytest.fixture
def mnist_files(tmp_path: Path) -> Path:
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, size in FILES.items():
        labels = bytes(number % 10 for number in range(size))
        # every digit has its own grey level, so that there is something to learn
        images = b"".join(bytes([20 * label + 10]) * 784 for label in labels)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 0x803, size, 28, 28) + images
        )
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, size) + labels)
    return tmp_path / "data"


def test_two_ranks_train_on_files_that_are_there(tmp_path: Path, mnist_files: Path) -> None:
    words = ["mnist", f"run.root={tmp_path}", "run.name=mnist", f"data.root={mnist_files}"]
    output = train(2, [*words, "train.epochs=2"], tmp_path / "logs")
    assert "step 8/8" in output
    assert not list(mnist_files.glob(".*"))


def test_without_network_and_files_all_ranks_stop_with_one_message(tmp_path: Path) -> None:
    words = ["mnist", f"run.root={tmp_path}", "run.name=mnist", f"data.root={tmp_path}/data"]
    # A proxy that nobody runs: the download fails at once, wherever this test is.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    ranks = Ranks(2, words, tmp_path / "logs", env=nowhere)
    assert ranks.wait() == [2, 2]
    errors = [line for line in ranks.output().splitlines() if "error:" in line]
    assert len(errors) == 1
    assert f"{tmp_path}/data/MNIST/raw by hand" in errors[0]
    assert "the recipe 'digits'" in errors[0]
    assert not list((tmp_path / "data").glob(".*"))
