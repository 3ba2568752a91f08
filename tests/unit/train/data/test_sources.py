"""Each source on small real files in its own format; nothing is downloaded."""

from __future__ import annotations

import gzip
import itertools
import math
import os
import pickle
import struct
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import DataLoader

from rollcall.config import parse
from rollcall.config.schema import ConfigError, Data
from rollcall.train.data import sets
from rollcall.train.data.form import Form
from rollcall.train.data.loading import Loading
from rollcall.train.data.mixture import Mixture
from rollcall.train.data.order import Order, training_batches, validation_batches
from rollcall.train.data.reader import Selection
from rollcall.train.data.sets.images import ImageFiles, ImageFormat
from rollcall.train.data.source import Batch, Source
from rollcall.train.data.stream import Shards, adapted
from rollcall.train.numerics.losses import per_sample_loss
from rollcall.train.ranks.world import Place, World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(Place("one process"), torch.device("cpu"))
    dist.destroy_process_group()


def load(world: World, **keys: Any) -> Source:
    return sets.load(Data(**keys), world)


def first(source: Source, rows: int = 4) -> Batch:
    order = Order(source.train_size, source.train_size, rows, seed=0)
    return next(training_batches(source, order, range(rows), range(order.steps)))


def validation(source: Source) -> Batch:
    return next(validation_batches(source, 1000, 0, 1))


def test_fashionmnist(world: World, tmp_path: Path) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name, size in {"train": 20, "t10k": 10}.items():
        pixels = np.arange(size, dtype=np.uint8).repeat(784).tobytes()
        labels = bytes(number % 10 for number in range(size))
        images = struct.pack(">IIII", 0x803, size, 28, 28) + pixels
        (raw / f"{name}-images-idx3-ubyte").write_bytes(images)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, size) + labels)
    source = load(world, name="fashionmnist", root=str(tmp_path))
    batch = validation(source)
    assert batch.inputs.shape == (10, 1, 28, 28) and batch.targets.tolist() == [*range(10)]
    assert batch.inputs[:, 0, 3, 3].tolist() == pytest.approx(
        [(number / 255 - 0.2860) / 0.3530 for number in range(10)], abs=1e-6
    )
    assert source.names[1] == "Trouser"


@pytest.mark.parametrize(("name", "labels"), [("cifar10", "labels"), ("cifar100", "fine_labels")])
def test_cifar(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, labels: str
) -> None:
    from torchvision.datasets import CIFAR10, CIFAR100, cifar

    # The checksums belong to the real files; everything else reads ours.
    monkeypatch.setattr(cifar, "check_integrity", lambda path, _md5=None: Path(path).exists())
    kind = {"cifar10": CIFAR10, "cifar100": CIFAR100}[name]
    classes = int(name.removeprefix("cifar"))
    base = tmp_path / kind.base_folder
    base.mkdir()
    for file, _ in [*kind.train_list, *kind.test_list]:
        pixels = np.random.default_rng(0).integers(256, size=(6, 3072), dtype=np.uint8)
        content = {"data": pixels, labels: [*range(6)]}
        (base / file).write_bytes(pickle.dumps(content))
    meta = {kind.meta["key"]: [f"class {number}" for number in range(classes)]}
    (base / kind.meta["filename"]).write_bytes(pickle.dumps(meta))
    source = load(world, name=name, root=str(tmp_path))
    assert (source.shape, source.classes, source.names[5]) == ((3, 32, 32), classes, "class 5")
    batch = validation(source)
    assert batch.targets.tolist() == [*range(6)]
    mean, std = (0.4914, 0.2470) if name == "cifar10" else (0.5071, 0.2673)
    # A number near 1 in fp32 is off by up to 2^-24, and dividing it by 0.25 makes that 4 * 2^-24.
    expected = (pixels[2, 1] / 255 - mean) / std
    assert float(batch.inputs[2, 0, 0, 1]) == pytest.approx(expected, abs=1e-6)
    shifted = load(world, name=name, root=str(tmp_path), augment=True)
    assert not torch.equal(first(shifted).inputs, first(source).inputs)
    assert torch.equal(first(shifted).inputs, first(shifted).inputs)
    assert torch.equal(validation(shifted).inputs, batch.inputs)


def test_damaged_download_is_refused(world: World, tmp_path: Path) -> None:
    raw = tmp_path / "cifar-10-batches-py"
    raw.mkdir()
    (raw / "data_batch_1").write_bytes(b"")
    with pytest.raises(
        ConfigError, match=rf"data.name=cifar10: {tmp_path}: .*corrupted.*delete it"
    ):
        load(world, name="cifar10", root=str(tmp_path))


def paint(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (20, 10)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_folder_of_class_directories(world: World, tmp_path: Path) -> None:
    for number in range(5):
        paint(tmp_path / "a" / f"{number}.png", (255, 0, 0))
        paint(tmp_path / "b" / f"{number}.JPG", (0, 0, 255), size=(30, 40))
    (tmp_path / "a" / "notes.txt").write_text("no image")
    source = load(world, name="folder", path=str(tmp_path), image_size=16)
    assert (source.train_size, source.validation_size, source.names) == (8, 2, ("a", "b"))
    assert source.shape == (3, 16, 16)
    batch = validation(source)
    assert batch.targets.tolist() == [0, 1]
    assert batch.inputs[0, :, 8, 8].tolist() == pytest.approx(
        [(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225], abs=1e-5
    )
    augmented = load(world, name="folder", path=str(tmp_path), image_size=16, augment=True)
    assert first(augmented).inputs.shape == (4, 3, 16, 16)
    assert source.read is not None
    read = source.read([tmp_path / "a" / "0.png"])
    assert torch.equal(read[0][0], source.train[0][0])


@pytest.mark.parametrize(("edge", "decoded"), [(16, (30, 20)), (40, (60, 40))])
def test_a_large_jpeg_is_not_decoded_whole(
    edge: int,
    decoded: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Image.radial_gradient("L").resize((120, 80)).convert("RGB")
    for name in ("a.jpg", "a.png"):
        whole.save(tmp_path / name, quality=95)
    resize, sizes = Image.Image.resize, []

    def noted(image: Image.Image, *words: Any) -> Image.Image:
        sizes.append(image.size)
        return resize(image, *words)

    monkeypatch.setattr(Image.Image, "resize", noted)
    form = ImageFormat(edge, (0.0,) * 3, (1.0,) * 3)
    files = [(tmp_path / name, 0) for name in ("a.jpg", "a.png")]
    held = ImageFiles(files, form)
    jpeg, png = held[0][0], held[1][0]
    assert sizes == [decoded, (120, 80)]
    assert (jpeg - png).abs().max() < 0.04


def test_image_files_may_have_any_names() -> None:
    given = ["a/ü.jpg", os.fsdecode(b"b/\xff.jpg"), "c"]
    held = ImageFiles([(Path(name), 0) for name in given], ImageFormat(8, (0.0,), (1.0,)))
    assert [held.where(number) for number in range(len(held))] == given
    with pytest.raises(IndexError):
        held[3]


def test_folder_with_train_and_val(world: World, tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in ("a", "b"):
            paint(tmp_path / split / name / "0.png", (1, 2, 3))
    source = load(world, name="folder", path=str(tmp_path), image_size=8)
    assert (source.train_size, source.validation_size) == (2, 2)
    paint(tmp_path / "val" / "c" / "0.png", (1, 2, 3))
    with pytest.raises(ConfigError, match="class c is not among the classes of train/"):
        load(world, name="folder", path=str(tmp_path))


def test_text_of_any_files(world: World, tmp_path: Path) -> None:
    content = bytes(range(256)) * 4
    (tmp_path / "one.txt").write_bytes(content[:500])
    (tmp_path / "two.txt").write_bytes(content[500:])
    source = load(world, name="text", path=f"{tmp_path}/one.txt,{tmp_path}/tw*", seq_len=10)
    assert (source.train_size, source.validation_size) == (100, 2)
    batch = validation(source)
    assert batch.inputs[0].tolist() == [*content[490:500]]
    assert batch.targets[1].tolist() == [*content[991:1001]]
    seen = training_batches(source, Order(100, 100, 100, 0), range(100), range(1))
    starts = {tuple(row) for row in next(seen).inputs.tolist()}
    assert starts == {
        tuple(content[10 * number : 10 * number + 10]) for number in range(102) if number % 50 != 49
    }


def test_token_files(world: World, tmp_path: Path) -> None:
    stream = np.arange(1000, 1101, dtype=np.uint16)
    (tmp_path / "wide").mkdir()
    for split, tokens in (("train", stream), ("val", stream[:21])):
        tokens.tofile(tmp_path / f"{split}.bin")
        (tokens.astype(np.uint32) + 2**16).tofile(tmp_path / "wide" / f"{split}.u32")
    (tmp_path / "wide" / "tokens.json").write_text('{"vocabulary": 70000}')
    wide = load(world, name="tokens", path=str(tmp_path / "wide"), seq_len=10)
    assert validation(wide).inputs[1].tolist() == [*range(66546, 66556)] and wide.classes == 70000
    source = load(world, name="tokens", path=str(tmp_path), seq_len=10)
    assert (source.train_size, source.validation_size, source.classes) == (10, 2, 1101)
    assert validation(source).inputs.tolist() == [[*range(1000, 1010)], [*range(1010, 1020)]]
    assert validation(source).targets.tolist() == [[*range(1001, 1011)], [*range(1011, 1021)]]

    too_few = load(world, name="tokens", path=str(tmp_path), seq_len=10, num_classes=1050)
    loading = Loading()
    order = Order(10, 10, 10, 0)
    batch = next(training_batches(too_few, order, range(10), range(1), loading))
    assert batch.weights.sum() == 4 and loading.unreadable == 6
    with pytest.raises(ConfigError, match=r"token 1.*is outside the vocabulary of 1050"):
        loading.refuse(world, 6)


def test_synthetic_images_cost_nothing(world: World) -> None:
    tracemalloc.start()
    source = load(world, name="synthetic_images", num_samples=10**9, image_size=32, num_classes=100)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    assert source.train_size == 10**9 and source.shape == (3, 32, 32)
    batch = first(source, rows=256)
    assert (
        len({*batch.targets.tolist()}) > 80
        and 0 <= batch.targets.min() <= batch.targets.max() < 100
    )
    assert torch.equal(batch.inputs, first(source, rows=256).inputs)
    assert abs(float(batch.inputs.std()) - 1) < 0.1


def test_synthetic_tokens(world: World) -> None:
    source = load(world, name="synthetic_tokens", num_samples=10**9, seq_len=32, num_classes=1000)
    batch = first(source)
    assert batch.inputs.shape == (4, 32) and batch.inputs.max() < 1000
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"name": "folder", "path": "{here}/none"}, "cannot read {here}/none: No such file"),
        (
            {"name": "folder", "path": "{here}/empty"},
            "expected one directory per class in {here}/empty",
        ),
        ({"name": "folder", "path": "{here}"}, "found no images"),
        ({"name": "text", "path": "{here}/none"}, "data.path: no file matches '{here}/none'"),
        ({"name": "text", "path": "{here}/odd"}, "fewer than 50 samples of data.seq_len=128"),
        ({"name": "tokens", "path": "{here}"}, "train.bin: cannot read: No such file"),
        ({"name": "tokens", "path": "{here}/odd.d"}, "train.bin: expected whole tokens"),
        (
            {"name": "digits", "augment": True},
            "data.name=digits has no augmentation; remove it, or choose cifar10, cifar100, folder",
        ),
    ],
)
def test_refusals_say_what_is_missing(
    world: World, tmp_path: Path, keys: dict[str, Any], problem: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").write_bytes(b"abc")
    (tmp_path / "odd.d").mkdir()
    (tmp_path / "odd.d" / "train.bin").write_bytes(b"abc")
    if "path" in keys:
        keys = {**keys, "path": keys["path"].format(here=tmp_path)}
    with pytest.raises(ConfigError) as refusal:
        load(world, **keys)
    assert problem.format(here=tmp_path) in str(refusal.value)


def test_archives_put_there_by_hand_are_unpacked(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.datasets import mnist, utils

    # The checksums belong to the real files; everything else reads ours.
    for module in (mnist, utils):
        monkeypatch.setattr(module, "check_integrity", lambda path, _md5=None: Path(path).exists())
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train", "t10k"):
        images = struct.pack(">IIII", 0x803, 2, 28, 28) + bytes(2 * 784)
        (raw / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        labels = struct.pack(">II", 0x801, 2) + bytes([3, 4])
        (raw / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    source = load(world, name="mnist", root=str(tmp_path))
    assert validation(source).targets.tolist() == [3, 4]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kind", ["bool", "int8", "uint8", "uint16", "uint32", "int32"])
def test_class_numbers_may_have_any_integer_format(kind: str) -> None:
    def sample(count: int) -> tuple[torch.Tensor, Any]:
        return torch.zeros(count), np.ones(count, kind)

    _, targets = Form().inputs_and_targets([sample(3), sample(3)])
    scores = torch.zeros(2, 3, 4)
    assert per_sample_loss(scores, targets).tolist() == pytest.approx([math.log(4)] * 2)
    _, targets = Form(pad=True).inputs_and_targets([sample(1), sample(3)])
    assert targets.tolist() == [[1, -100, -100], [1, 1, 1]]


def test_a_mixture_keeps_its_proportions_when_it_is_resumed() -> None:
    large, small = [float(number) for number in range(7)], [100.0, 101.0, 102.0, 103.0]
    mixture = Mixture([large, small], [3, 1])
    assert len(mixture) == 16 and mixture.where(13) == "sample 1 of set 1"
    source = Source(mixture, mixture)

    def samples(order: Order, steps: range) -> list[float]:
        batches = training_batches(source, order, range(order.global_batch), steps)
        return [*itertools.chain(*(batch.inputs[batch.weights > 0].tolist() for batch in batches))]

    order = Order(16, 32, global_batch=5, seed=3)
    seen = samples(order, range(order.steps))
    for epoch in (seen[:16], seen[16:]):
        counts = Counter(epoch)
        assert {counts[one] for one in small} == {1}
        assert {counts[one] for one in large} == {1, 2} and sum(counts[one] for one in large) == 12
    assert sorted(seen[:16], key=seen.index) != sorted(seen[:16])
    resumed = Order(16, 32, global_batch=3, seed=3)
    resumed.continue_from(2, order.facts(2))
    assert samples(resumed, range(2, resumed.steps)) == seen[10:]
    for weights, several in (
        ([1], [large, small]),
        ([1, -1], [large, small]),
        ([1, 1], [large, []]),
    ):
        with pytest.raises(ConfigError, match="a mixture"):
            Mixture(several, weights)


@pytest.mark.parametrize("trial", range(20))
def test_shards_of_any_lengths_give_each_sample_once_per_epoch(trial: int) -> None:
    """Whatever the shards, the parts and the global batch: empty shards, few or many samples."""
    drawn = np.random.default_rng(trial)
    lengths = [int(one) for one in drawn.integers(0, 7, int(drawn.integers(1, 9)))]
    lengths[0] += 1
    numbers = iter(range(99))
    shards = [[next(numbers) for _ in range(length)] for length in lengths]
    data = Shards(shards, lengths, "shards", seed=0, parts=2 ** int(drawn.integers(0, 5)))
    batch, size = int(drawn.integers(1, 12)), sum(lengths)
    order = Order.of_run(
        parse([f"data.global_batch={batch}", "train.epochs=3"])[1], Source(data, data)
    )
    cut = int(drawn.integers(1, batch + 1))  # rows of the first of two ranks
    seen = []
    for step in range(order.steps):
        rows = [order.samples(step, span)[0] for span in (range(cut), range(cut, batch))]
        positions = [*rows[0], *rows[1]][: order.count(step)]
        assert sorted(positions) == [*range(order.position(step), order.position(step + 1))]
        seen += [data[position] for position in sorted(positions)]
    for epoch in range(3):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == [*range(size)], (trial, epoch)


def test_shards_that_say_a_wrong_length_are_named() -> None:
    def refused(shards: Any, **more: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            made = adapted(SimpleNamespace(shards=shards, **more), "mine", 0, Form())
            [made[position] for position in range(made.count())]
        return str(caught.value)

    rows = [[1, 2], [3, 4]]
    assert "shard 1 has only 2 samples, but its length is 3" in refused(rows, lengths=[2, 3])
    assert "shard 0 has more samples, but its length is 1" in refused(rows, lengths=[1, 2])
    assert "shard 1 has only 2 samples, but" in refused(rows, lengths=np.array([2, 3]))
    assert "has 2 shards, but 3 `lengths`" in refused(rows, lengths=[1, 2, 3])
    assert "shard 1 has the length None; let len() return" in refused([[1], Unsized()])
    assert "shard 1 has the length 2.5; let len() return" in refused(rows, lengths=[2, 2.5])
    known = adapted(SimpleNamespace(shards=rows, lengths=np.array([2, 2])), "mine", 0, Form())
    assert known.count() == 4
    assert "shard 0, a list_iterator, can be read only once" in refused([iter([1])], lengths=[1])


class Counted:
    classes = 7

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return torch.ones(2), number


def test_a_data_set_may_say_the_number_of_its_classes(world: World) -> None:
    """Torchvision's say their names; both are an attribute `classes`."""
    source = load(world, name=f"{__name__}:Counted")
    assert (source.classes, source.names) == (7, ())


class Unsized:
    def __iter__(self) -> Iterator[int]:
        return iter([1])


def test_keys_of_samples_may_come_in_any_order() -> None:
    rows = [{"x": torch.ones(2), "y": 1}], [{"y": 1, "x": torch.ones(2)}]
    source = sets._source(rows, Data(name="mine"), 0)
    assert source.validation_size == 1
    with pytest.raises(ConfigError, match="the inputs of the validation data are"):
        sets._source((rows[0], [{"z": torch.ones(2), "y": 1}]), Data(name="mine"), 0)


def test_a_loader_is_told_the_epoch() -> None:
    class Loader(DataLoader[int]):
        epochs: ClassVar[list[int]] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    data = adapted(Loader([1, 2, 3]), "mine", 0, Form())  # type: ignore[arg-type]
    assert [int(data[position]) for position in range(5)] == [1, 2, 3, 1, 2]
    assert Loader.epochs == [0, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_images_travel_as_bytes(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of their size; where they are used, they are normalized to the same bits."""
    files = []
    for number in range(6):
        files.append((tmp_path / f"{number}.png", number))
        pixels = np.random.default_rng(number).integers(0, 256, (9, 9, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(files[-1][0])
    images = ImageFiles(files, ImageFormat(9, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    travelled, before = list[Batch](), Loading._ahead

    def ahead(self: Loading, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in before(self, batches):
            travelled.append(batch)
            yield batch

    monkeypatch.setattr(Loading, "_ahead", ahead)
    config = Data(num_workers=workers)

    def select(number: int) -> Any:
        return Selection([2 * number, 2 * number + 1], [0, 0], torch.ones(2))

    found = [*Loading(config).batches(images, "the data", select, range(3))]
    expected = torch.stack([images[number][0] for number in range(6)])
    assert torch.equal(torch.cat([batch.inputs for batch in found]), expected)
    assert [batch.inputs.dtype for batch in travelled] == [torch.uint8] * 3
    # Code of the user's gets them as before.
    form = Form(
        collate=lambda rows: tuple(
            map(torch.stack, zip(*[(x, torch.tensor(y)) for x, y in rows], strict=True))
        )
    )
    [batch] = Loading(config).batches(images, "the data", select, range(1), form)
    assert torch.equal(batch.inputs, expected[:2])
