"""Muon skips an update on the device: no number is read, and no bit changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rollcall.config.schema import Optim
from rollcall.train.numerics import optim


class _NoReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails where a number is read, for which a host waits for its GPU."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def _build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.ParameterDict({"a": torch.randn(6, 4), "stack": torch.randn(3, 4, 5)})
    model["bias"] = nn.Parameter(torch.randn(4))
    names = {weight: name for name, weight in model.named_parameters()}
    config = Optim(name="muon", lr=0.1, weight_decay=0.3)
    return model, optim.build(config, [*optim.groups(config, names, names, {model["stack"]})])


def _bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    weights = [weight for weight in model.parameters() if weight in optimizer.state]
    state = [value for one in weights for value in optimizer.state[one].values()]
    return [one.detach().clone() for one in [*model.parameters(), *state]]


@pytest.mark.parametrize("is_first", [False, True])
def test_an_update_is_skipped_without_a_wait(is_first: bool) -> None:
    (model, optimizer), (plain, its_optimizer) = _build(), _build()
    assert optim.skips_on_device(optimizer)
    found: Any = optimizer
    for step in range(3):
        is_bad = step == (0 if is_first else 1)
        before = _bits(model, optimizer)
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        for weight, other in pairs:
            weight.grad = torch.randn(weight.shape) * (torch.nan if is_bad else 1)
            other.grad = weight.grad.clone()
        found.found_inf = torch.tensor(float(is_bad))
        with _NoReads():  # type: ignore[no-untyped-call]
            optimizer.step()
        if is_bad:
            after = _bits(model, optimizer)[: len(before)]
            assert all(torch.equal(*pair) for pair in zip(after, before, strict=True))
        else:
            its_optimizer.step()
    for one, two in zip(_bits(model, optimizer), _bits(plain, its_optimizer), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)
    assert all("weight_decay" in group for group in optimizer.param_groups)


def test_an_optimizer_of_ones_own_waits() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert not optim.skips_on_device(torch.optim.Adagrad([weight]))
    assert optim.skips_on_device(torch.optim.AdamW([weight], fused=True))
