"""An optimizer of the user's is called as in a loop of one's own."""

from pathlib import Path
from typing import ClassVar

import torch

from rollcall.train.main import main


class Noting(torch.optim.SGD):
    """Notes when its gradients are dropped, as an optimizer with weights of its own must know."""

    calls: ClassVar[list[str]] = []

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Note the call and do it."""
        self.calls.append("step")
        super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Note the call and do it."""
        self.calls.append("zero_grad")
        super().zero_grad(set_to_none)


def test_its_own_zero_grad_follows_each_step(tmp_path: Path) -> None:
    words = ["digits", f"optim.name={__name__}:Noting", "device=cpu", "train.steps=2"]
    assert main([*words, f"run.root={tmp_path}"]) == 0
    assert Noting.calls[:4] == ["step", "zero_grad"] * 2
