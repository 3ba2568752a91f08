"""Mistakes that users make in their own code."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Rows(list[Any]):
    """Samples in a list, which is a map-style data set."""


class Forwardless(nn.Module):
    """A model whose author forgot its forward method."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)


class Net(nn.Sequential):
    """A linear layer by the name of `head`."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("flat", nn.Flatten())
        self.add_module("head", nn.Linear(4, 3))


class Held(Net):
    """Keeps a weight in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"weights": [*self.parameters()]}


class Silent(Net):
    """Takes the labels, and returns no loss."""

    def forward(self, x: Any, labels: Any) -> Any:  # type: ignore[override]  # noqa: ARG002
        return super().forward(x)  # type: ignore[no-untyped-call]


class Late(Net):
    """Makes a layer when it is called."""

    def forward(self, x: Any) -> Any:
        if not hasattr(self, "late"):
            self.late = nn.Linear(3, 3)
        return self.late(super().forward(x))  # type: ignore[no-untyped-call]


class Unusual(Net):
    """Has a frozen weight of whole numbers, and keeps a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(4), requires_grad=False)

    def get_extra_state(self) -> Any:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


class Words(nn.Module):
    """Takes no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 4)
        self.head = nn.Linear(4, 32)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embed(input_ids).cumsum(1))
        return logits


class Summed(Words):
    """Takes positions, and does not use them."""

    def forward(self, input_ids: Any, position_ids: Any) -> Any:  # type: ignore[override]  # noqa: ARG002
        return super().forward(input_ids)


class Stream:
    """An iterable without a length."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def net() -> nn.Module:
    return Net()


def lazy() -> nn.Module:
    return nn.LazyLinear(3)


def still() -> nn.Module:
    return nn.BatchNorm1d(4, affine=False)


def on_meta() -> nn.Module:
    return nn.Linear(4, 3, device="meta")


def one_output() -> nn.Module:
    return nn.Linear(4, 1)


def no_module() -> Any:
    return net


def _both(samples: list[Any]) -> Any:
    return Rows(samples), Rows(samples)


def pairs() -> Any:
    return _both([(torch.ones(4) * n, n % 3) for n in range(8)])


def text() -> Any:
    return _both([("a sentence", 1)] * 8)


def nothing() -> Any:
    return _both([None] * 8)


def image() -> Any:
    images: Any = importlib.import_module("PIL.Image")
    return _both([(images.new("RGB", (2, 2)), 1)] * 8)


def empty() -> Any:
    return _both([()] * 8)


def other_keys() -> Any:
    return _both([{"input": torch.ones(4), "label" if n else "labels": 1} for n in range(8)])


def ragged() -> Any:
    return _both([(torch.ones(2 + n), n % 3) for n in range(8)])


def numbers() -> Any:
    return _both([(1.0, 1)] * 8)


def named() -> Any:
    return _both([{"x": torch.ones(4), "label": 1}] * 8)


def only_label() -> Any:
    return _both([{"label": 1}] * 8)


def inputs_alone() -> Any:
    return _both([torch.ones(4)] * 8)


def floats() -> Any:
    return _both([(torch.ones(4), 0.5)] * 8)


def three() -> Any:
    return (*pairs(), Rows())


def generator() -> Any:
    return (one for one in pairs()[0]), pairs()[1]


def sparse() -> Any:
    return _both([(torch.ones(4).to_sparse(), 1)] * 8)


def hollow() -> Any:
    row = torch.zeros(0).long()
    return Rows([{"input_ids": row, "labels": row}] * 8), None


def unlabelled() -> Any:
    return pairs()[0], Rows([torch.ones(4)] * 8)


def no_row() -> Any:
    return Rows(), None


def no_second() -> Any:
    return pairs()[0], {"first": pairs()[0], "second": Rows()}


def dry_validation() -> Any:
    return pairs()[0], Stream([])


def library() -> Any:
    return {"train": pairs()[0], "validation": pairs()[1]}


def other_classes() -> Any:
    return _both([(torch.ones(4), n) for n in range(8)])


def keyed_by_number() -> Any:
    return _both([{0: torch.ones(4), "label": 1}] * 8)


def number() -> Any:
    return 3


def endless() -> Any:
    return Stream(pairs()[0]), pairs()[1]


class Long(Stream):
    """Says that it has more samples than it yields."""

    def __len__(self) -> int:
        return 100


def long() -> Any:
    return Long(pairs()[0]), None


def dry() -> Any:
    return Stream([]), pairs()[1]


def unsized() -> Any:
    return SimpleNamespace(shards=[Stream(pairs()[0])]), None


def long_rows() -> Any:
    return Stream([torch.ones(7)] * 8), None


def sharded() -> Any:
    return SimpleNamespace(shards=[pairs()[0]]), None


def broken_collate(samples: list[Any]) -> Any:
    return dict(enumerate(samples))["x"]  # type: ignore[index]


def short_collate(samples: list[Any]) -> Any:
    return torch.ones(1, 4), torch.ones(len(samples))


def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets)


def of_inputs(outputs: torch.Tensor, targets: Any) -> torch.Tensor:
    assert targets == ()
    return outputs.square().sum(1)


def of_two(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    one = functional.binary_cross_entropy_with_logits
    return one(outputs[:, 0], (targets > 0).float(), reduction="none")


def first(outputs: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
    return outputs[:, 0]


class First:
    """A metric that returns its figure by a name."""

    def __call__(self, outputs: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
        return outputs[:, 0]

    def result(self, total: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"one": total}


def alone(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).sum()


def worded(model: nn.Module, batch: Any) -> Any:
    return "loss", model(batch[0]).sum()


def good(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).sum(), 1


def detached(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.detach(), targets, reduction="none")


def of_outputs(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.sum(1)


def lone_figure(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).sum(), 1, {"right": 3}


def no_optimizer(params: Any) -> Any:
    return list(params)


class Wordy(torch.optim.SGD):
    """Keeps a text of each weight."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["note"] = "a text"


def numpy_schedule(step: int, steps: int) -> Any:
    return np.float32(1 - step / steps)


def worded_schedule(step: int, steps: int) -> Any:
    return f"{step} of {steps}"


def falling_schedule(step: int, steps: int) -> float:
    return 1 - 2 * step / steps


def no_callback() -> Any:
    return object()


class Reporting:
    def __init__(
        self, name: str = "mine", value: Any = 1.0, numbered: bool = False, action: Any = None
    ) -> None:
        self.name, self.value, self.numbered, self.action = name, value, numbered, action
        self.calls = 0

    def report(self) -> dict[str, Any]:
        self.calls += 1
        return {f"{self.name}{self.calls - 1 or ''}" if self.numbered else self.name: self.value}

    def settle(self, _step: int, _agreed: Any) -> Any:
        return self.action


class Missing:
    """A logger whose package is missing."""

    def __init__(self) -> None:
        importlib.import_module("not_here")
