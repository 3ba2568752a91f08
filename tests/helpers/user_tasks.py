"""Tasks such as users bring: dictionaries of unequal length, streams, losses and metrics."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset

WORDS = 32


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sentences of 4 to 12 tokens, as Hugging Face's data sets have them."""

    def __init__(self, count: int, shortest: int = 4) -> None:
        self.count, self.shortest = count, shortest

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = self.shortest + index * 7 % (13 - self.shortest)
        drawn = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, WORDS, (length,), generator=drawn)
        return {"input_ids": tokens, "labels": tokens.clone()}


class Counted(IterableDataset[dict[str, torch.Tensor]]):
    """A stream of the same, which counts what it reads and knows its place."""

    def __init__(self, count: int) -> None:
        self.sentences, self.read, self.place = Sentences(count), 0, 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.place < len(self.sentences):
            self.read, self.place = self.read + 1, self.place + 1
            yield self.sentences[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Plain(IterableDataset[dict[str, torch.Tensor]]):
    """A stream without a state."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from map(Sentences(23).__getitem__, range(23))


class Sparse(IterableDataset[dict[str, torch.Tensor]]):
    """A stream whose first half alone has targets that count."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(220):
            row = Sentences(220)[number]
            yield row if number < 110 else {**row, "labels": row["labels"] * 0 - 100}


def sparse() -> Any:
    return Sparse(), None


def sentences(count: int = 50) -> Any:
    return Sentences(count), {"first": Sentences(11), "second": Sentences(7)}


def words() -> Any:
    from rollcall.train.data.source import Source

    return Source(Sentences(50), Sentences(11), classes=WORDS)


def stream(kind: str = "counted") -> Any:
    return Counted(23) if kind == "counted" else Plain(), Sentences(11)


def word_stream() -> Any:
    from rollcall.train.data.source import Source

    return Source(Counted(23), Sentences(11), classes=WORDS)


def write_shards(folder: Path, count: int = 23, size: int = 6) -> None:
    """Write the sentences into tar files, one member each, as webdataset has them."""
    folder.mkdir()
    for first in range(0, count, size):
        with tarfile.open(folder / f"{first:06d}.tar", "w") as tar:
            for number in range(first, min(first + size, count)):
                text = json.dumps(Sentences(count)[number]["input_ids"].tolist()).encode()
                member = tarfile.TarInfo(f"{number}.json")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))


class Tars(IterableDataset[bytes]):
    """The members of tar files, undecoded, since every rank reads all; it knows its place."""

    def __init__(self, folder: str) -> None:
        self.paths, self.place = sorted(Path(folder).glob("*.tar")), (0, 0)

    def __iter__(self) -> Iterator[bytes]:
        shard, row = self.place
        for number, path in enumerate(self.paths[shard:], shard):
            with tarfile.open(path) as tar:
                for member in tar.getmembers()[row:]:
                    row += 1
                    self.place = number, row
                    content = tar.extractfile(member)
                    yield content.read() if content else b""
            row = 0
        self.place = 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        shard, row = state["place"]
        self.place = shard, row


def shards(folder: str) -> Any:
    return Tars(folder), Sentences(11)


class Shard:
    """A few numbers, and where to note what is read."""

    def __init__(self, numbers: range, log: str) -> None:
        self.numbers, self.log = numbers, log

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers:
            note(self.log, f"read {number}")
            yield self.log, number


def note(log: str, line: str) -> None:
    with Path(log).open("a") as file:
        file.write(f"{line}\n")


def numbered(log: str, world: Any, shards: int = 8) -> Any:
    """Shards of four numbers each, for training and for validation."""
    logs = f"{log}-{world.rank}", f"{log}-val-{world.rank}"
    spans = [range(4 * number, 4 * number + 4) for number in range(shards)]
    return [SimpleNamespace(shards=[Shard(span, log) for span in spans]) for log in logs]


def of_numbers(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Make sentences of a rank's own numbers, and note these."""
    note(samples[0][0], f"seen {' '.join(str(number) for _, number in samples)}")
    return decoded([Sentences(40)[number] for _, number in samples])


def decoded(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Decode and pad a rank's own rows."""
    rows = [json.loads(one) if isinstance(one, bytes) else one["input_ids"] for one in samples]
    found = {"input_ids": torch.zeros(len(rows), 12).long()}
    found |= {"attention_mask": found["input_ids"].clone(), "labels": found["input_ids"] - 100}
    for number, row in enumerate(rows):
        for name, value in (("input_ids", row), ("labels", row), ("attention_mask", 1)):
            found[name][number, : len(row)] = torch.as_tensor(value)
    return found


def hub(kind: str) -> Any:
    """The sentences in a data set of Hugging Face: map-style, or a stream of four shards."""
    library = importlib.import_module("datasets")
    rows = [
        {name: one.tolist() for name, one in row.items()}
        for row in map(Sentences(23).__getitem__, range(23))
    ]
    whole = library.Dataset.from_list(rows)
    stream = whole.to_iterable_dataset(num_shards=4)
    parts = [stream.shard(num_shards=4, index=number) for number in range(4)]
    sharded = SimpleNamespace(shards=parts, lengths=[sum(1 for _ in part) for part in parts])
    shuffled = stream.shuffle(seed=3, buffer_size=8)
    sets = {"map": whole, "stream": stream, "shuffled": shuffled, "shards": sharded}
    return sets[kind], whole.select(range(11))


def loader() -> Any:
    return DataLoader(Sentences(24, 12), batch_size=8), Sentences(11, 12)


class Net(nn.Module):
    """Attends to the words before with equal weights."""

    tensor_plan: ClassVar = {"up": "columns", "down": "rows"}

    def __init__(self, width: int = 16, words: int = WORDS) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, words)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the logits: (rows, length) to (rows, length, words)."""
        mask = attention_mask[..., None]
        x: torch.Tensor = self.embed(input_ids) * mask
        x = x + x.cumsum(1) / mask.cumsum(1).clamp(min=1)
        x = x + self.down(functional.gelu(self.up(x)))
        logits: torch.Tensor = self.head(x)
        return logits


class Returned(NamedTuple):
    """What a model of Hugging Face returns."""

    loss: torch.Tensor
    logits: torch.Tensor


class Whole(Net):
    """The same, which also computes the mean loss of all next words, or a part of it."""

    def __init__(self, width: int = 16, part: float = 1.0) -> None:
        super().__init__(width)
        self.part = part

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:  # type: ignore[override]
        logits = super().forward(input_ids, attention_mask)
        mean = functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])
        return Returned(mean * self.part, logits)


class Packed(nn.Module):
    """Computes the mean loss of the labels, or of the next ones, from each word and its place."""

    def __init__(self, shifts: bool = False) -> None:
        super().__init__()
        self.shifts = shifts
        self.embed, self.places = nn.Embedding(WORDS, 16), nn.Embedding(64, 16)
        self.head = nn.Linear(16, WORDS)

    def forward(self, input_ids: Any, position_ids: Any, labels: Any = None) -> Any:
        """Return the loss, if there are labels, and the logits."""
        logits = self.head(self.embed(input_ids) + self.places(position_ids))
        if labels is None:
            return logits
        scores, right = (logits[:, :-1], labels[:, 1:]) if self.shifts else (logits, labels)
        return Returned(functional.cross_entropy(scores.transpose(1, 2), right), logits)


class Phases(nn.Module):
    """One complex weight, for the pixels in an order of whole numbers."""

    def __init__(self, has_order: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 10, dtype=torch.complex64) / 8)
        order = torch.arange(64).flip(0)
        self.order = nn.Parameter(order, requires_grad=False) if has_order else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = x.flatten(1) if self.order is None else x.flatten(1)[:, self.order]
        return (x.to(self.weight) @ self.weight).abs()


def loss(model: nn.Module, batch: dict[str, torch.Tensor], smoothing: float = 0.0) -> Any:
    """The sum of the losses of all next words, their number, and the number of right ones."""
    logits = model(batch["input_ids"], batch["attention_mask"])[:, :-1]
    targets = batch["labels"][:, 1:]
    losses = functional.cross_entropy(
        logits.transpose(1, 2), targets, reduction="none", label_smoothing=smoothing
    )
    counted = targets != -100
    right = ((logits.argmax(-1) == targets) & counted).sum()
    return losses.sum(), counted.sum(), {"right": (right, counted.sum())}


class Right:
    """The share of right words, and of wrong ones, and how many there are."""

    def __init__(self, times: float = 1.0) -> None:
        self.times = times

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        counted = targets != -100
        right = (outputs.argmax(-1) == targets) & counted
        return torch.stack([right.sum(1), counted.sum(1)], 1).float()

    def result(self, totals: torch.Tensor) -> dict[str, torch.Tensor]:
        share = totals[0] / totals[1] * self.times
        return {"share": share, "wrong": self.times - share, "words": totals[1]}


def focal(outputs: torch.Tensor, targets: torch.Tensor, gamma: float = 2.0) -> torch.Tensor:
    """A loss of one value for each sample."""
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return (1 - (-losses).exp()) ** gamma * losses


def margin(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A metric of one value for each sample."""
    return outputs.softmax(-1).gather(1, targets[:, None])[:, 0]


def fading(step: int, steps: int, power: float = 2.0) -> float:
    return float((1 - step / steps) ** power)


class Paced:
    """A callback that leaves the CPU to others in a run that is only waited for."""

    def settle(self, _step: Any, _agreed: dict[str, float]) -> None:
        time.sleep(0.02)


class Watcher:
    """A member of the step: sums a number over the ranks, and stops the run."""

    def __init__(self, run: Any, model: nn.Module, stop_at: int = 0) -> None:
        self.run, self.stop_at, self.weights = run, stop_at, sum(1 for _ in model.parameters())
        self.path = run.run_dir.path / f"watched-{run.world.rank}.txt"

    def report(self) -> dict[str, float]:
        return {"watched": 1.0}

    def settle(self, step: Any, agreed: dict[str, float]) -> Any:
        from rollcall.train.ranks.agreement import Action

        with self.path.open("a") as file:
            file.write(f"{step.number} {agreed['watched']:.0f} {self.weights}\n")
        return Action.STOP if step.number == self.stop_at else None

    def logged(self, step: int, values: dict[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(f"{step} {sorted(values)}\n")


class Killed:
    """Sends the rank a signal after a step of each attempt; -1 for none."""

    def __init__(self, run: Any, by: str, steps: str) -> None:
        mark = run.run_dir.path / "attempts"
        attempt = len(mark.read_text()) if mark.exists() else 0
        mark.write_text("x" * (attempt + 1))
        self.by = signal.Signals[by]
        self.step = int(steps.split("+")[attempt])

    def logged(self, step: int, _: dict[str, float]) -> None:
        if step == self.step:
            os.kill(os.getpid(), self.by)
