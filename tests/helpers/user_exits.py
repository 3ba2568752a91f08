"""Code of a user that ends its process with code 0, which would say that all is well."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from user_state import CLASSES, WIDTH, vectors


class Samples(Dataset[Any]):
    """Samples, the first of which may end the process."""

    def __init__(self, leaves: bool) -> None:
        (self._x, self._y), self._leaves = vectors()[0].tensors, leaves

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, number: int) -> Any:
        return sys.exit() if self._leaves and number == 0 else (self._x[number], self._y[number])


def data(where: str = "") -> Any:
    if where == "function":
        sys.exit()
    return Samples(where == "training"), Samples(where == "validation")


class Net(nn.Sequential):
    """Ends the process when it is made, in the passes before the first step, or later."""

    def __init__(self, where: str = "", step: int = 0) -> None:
        super().__init__(nn.Linear(WIDTH, CLASSES))
        self._step, self._calls = step, 0
        if where == "making":
            sys.exit()

    def forward(self, x: torch.Tensor) -> Any:
        """Return the logits."""
        self._calls += 1
        return sys.exit() if self._calls == self._step else super().forward(x)  # type: ignore[no-untyped-call]


class Callback:
    """Ends the process when it is made, after a step, or at the end."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._maybe("making")

    def _maybe(self, where: str) -> None:
        if self._where == where:
            sys.exit()

    def settle(self, _step: object, _agreed: object) -> Any:
        """Do nothing, or answer with something else than an action."""
        self._maybe("step")
        return {"word": "REPEAT", "number": 3}.get(self._where)

    def close(self) -> None:
        """Do nothing, as a rule."""
        self._maybe("closing")


def loss(_outputs: torch.Tensor, _targets: torch.Tensor) -> Any:
    sys.exit()
