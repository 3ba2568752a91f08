"""`rollcall bench data`: samples per second from rollcall's loading and from DataLoader.

Images are JPEG files of 256 by 256 pixels, resized to 224; tokens are windows of 1,024 from a file.
Both ways read the same data in random order, and take turns.
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from rollcall.config.schema import Data
from rollcall.tools.bench import turns
from rollcall.train.data import sets
from rollcall.train.data.loading import Loading
from rollcall.train.data.order import Order, training_batches
from rollcall.train.data.sets.tokens import mapped
from rollcall.train.data.source import Source
from rollcall.train.ranks.world import World

BATCH = 32
IMAGES = 400
TOKENS = 4_000_000
BATCHES = {"images": 20, "tokens": 1000}
"""Batches that are timed, after the first two."""
VOCABULARY = 50_000


class PlainWindows(Dataset[Any]):
    """Windows of a token file, as a first script would cut them."""

    def __init__(self, path: Path, length: int) -> None:
        self._tokens, self._length = mapped(path), length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self._length
        window = self._tokens[start : start + self._length + 1].astype(np.int64)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])


def main(argv: Sequence[str]) -> int:
    """Measure and print the table; return the exit code."""
    words = turns.parser("data", __doc__)
    words.add_argument("--workers", type=int, nargs="*", default=[0, 2], metavar="N")
    options = words.parse_args(argv)
    torch.set_num_threads(1)  # as in each worker
    rows: list[Sequence[str]] = [("", "workers", "rollcall", "DataLoader", "ratio")]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        _make(place)

        for kind, workers in itertools.product(BATCHES, options.workers):
            data = Data(num_workers=workers, global_batch=BATCH, image_size=224, seq_len=1024)
            batches = {name: partial(way, kind, place, data) for name, way in WAYS.items()}
            ways = {name: partial(_measure, make, kind) for name, make in batches.items()}
            found = turns.take_turns(ways, options.repeats).values()
            own, plain = (turns.column(each, "samples/s") for each in found)
            rates = [turns.cell(each, "{:,.0f}/s".format) for each in (own, plain)]
            rows.append((kind, str(workers), *rates, turns.cell(turns.ratios(own, plain))))
    turns.show(f"samples per second, medians of {options.repeats} runs, in turns", rows)
    return 0


def _make(place: Path) -> None:
    random = np.random.default_rng(0)
    (place / "images" / "class").mkdir(parents=True)
    for number in range(IMAGES):
        small = Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8))
        small.resize((256, 256)).save(place / "images" / "class" / f"{number}.jpg")
    for name in ("train.bin", "val.bin"):
        random.integers(0, VOCABULARY, TOKENS).astype("<u2").tofile(place / name)


def _source(kind: str, place: Path, config: Data) -> Source:
    own = {"name": "tokens", "path": str(place), "num_classes": VOCABULARY}
    if kind == "images":
        own = {"name": "folder", "path": str(place / "images")}
    return sets.load(config.model_copy(update=own), World())


def _rollcall(kind: str, place: Path, config: Data) -> Iterator[Any]:
    source = _source(kind, place, config)
    steps = BATCHES[kind] + 2
    order = Order(source.train_size, steps * BATCH, BATCH, seed=0)
    return training_batches(source, order, range(BATCH), range(steps), Loading(config))


def _dataloader(kind: str, place: Path, config: Data) -> Iterator[Any]:
    windows = PlainWindows(place / "train.bin", 1024)
    dataset = _source(kind, place, config).train if kind == "images" else windows
    count = config.num_workers
    loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=count, drop_last=True)
    return itertools.chain.from_iterable(itertools.repeat(loader))


WAYS = {"rollcall": _rollcall, "DataLoader": _dataloader}


def _measure(make: Callable[[], Iterator[Any]], kind: str, _: int) -> turns.Figures:
    batches = make()
    next(batches), next(batches)  # the workers have begun
    start = time.perf_counter()
    count = sum(BATCH for _ in itertools.islice(batches, BATCHES[kind]))
    return {"samples/s": count / (time.perf_counter() - start)}
