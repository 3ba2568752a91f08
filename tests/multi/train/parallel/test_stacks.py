"""Muon and the matrices of a stack of experts: each is updated as a weight for itself would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import together
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rollcall.config import parse
from rollcall.config.schema import ConfigError, Optim
from rollcall.train.numerics import losses, optim
from rollcall.train.numerics.losses import Objective
from rollcall.train.parallel.experts import Experts
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.world import World
from rollcall.train.weights.deferred import Draws

NUMBER, STEPS = 3, 3
CONFIG = Optim(name="muon", lr=0.1, weight_decay=0.1)
LAYOUTS: dict[str, tuple[tuple[str, ...], Any]] = {
    "zero3": (("shard",), [Shard(0)]),
    "hsdp": (("replicate", "shard"), [Replicate(), Shard(0)]),
    "shard×expert": (("shard", "expert"), [Shard(1), Shard(0)]),
}


def numbers(seed: int) -> list[torch.Tensor]:
    """A stack, a matrix and a vector."""
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=drawn) for shape in ((NUMBER, 4, 6), (6, 4), (4,))]


def trained(place: Any) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
    """Train these weights, of which `place` returns a shard."""
    model = nn.ParameterList([nn.Parameter(place(weight)) for weight in numbers(0)])
    names = {weight: name for name, weight in model.named_parameters()}
    optimizer = optim.build(CONFIG, [*optim.groups(CONFIG, names, names, {model[0]})])
    for step in range(STEPS):
        for weight, gradient in zip(model, numbers(step + 1), strict=True):
            weight.grad = place(gradient)
        if step == 1:  # the state before the first update, as for a save, changes nothing
            optim.complete_state(optimizer)
        optimizer.step()
    return model, optimizer


def by_hand() -> list[torch.Tensor]:
    stack, *rest = numbers(0)
    matrices = [*map(nn.Parameter, stack.unbind())]
    others = [*map(nn.Parameter, rest)]
    muon: Any = torch.optim.Muon(
        [*matrices, others[0]], lr=CONFIG.lr, weight_decay=CONFIG.weight_decay
    )
    adam = torch.optim.AdamW([others[1]], lr=CONFIG.lr, weight_decay=CONFIG.weight_decay)
    for step in range(STEPS):
        gradient, *more = numbers(step + 1)
        for weight, part in zip([*matrices, *others], [*gradient.unbind(), *more], strict=True):
            weight.grad = part
        muon.step()
        adam.step()
    return [torch.stack([*matrices]), *others]


def compare(rank: int, folder: Path) -> None:  # noqa: ARG001
    world = World.join("cpu")
    try:
        names, placements = LAYOUTS[folder.name]
        shape = (2,) * len(names)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)

        def place(tensor: torch.Tensor) -> DTensor:
            fits = [
                p if tensor.ndim > 2 else Shard(0) if n == "shard" else Replicate()
                for n, p in zip(names, placements, strict=True)
            ]
            return distribute_tensor(tensor, mesh, fits)

        model, optimizer = trained(place)
        for weight, expected in zip(model, by_hand(), strict=True):
            assert isinstance(weight, DTensor)
            torch.testing.assert_close(
                weight.full_tensor(), expected.detach(), rtol=1e-6, atol=1e-6
            )
        [momentum] = optimizer.state[model[0]].values()
        assert momentum.shape == model[0].shape and len(optimizer.state) == len(model)
    finally:
        world.leave()


def test_whole_stacks() -> None:
    model, optimizer = trained(torch.clone)
    for weight, expected in zip(model, by_hand(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-6)
    assert len(optimizer.state) == len(model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_stacks(tmp_path: Path, layout: str) -> None:
    together(2 ** len(LAYOUTS[layout][0]), compare, tmp_path / layout)


def test_a_pattern_that_gives_muon_what_is_no_matrix_is_refused() -> None:
    weights = nn.ParameterDict({"conv": torch.zeros(4, 1, 3), "bias": torch.zeros(4)})
    names = {weight: name for name, weight in weights.named_parameters()}
    config = Optim(name="adamw", groups={"*": {"optimizer": "muon"}})
    with pytest.raises(ConfigError, match="gives bias, conv to muon, which updates matrices"):
        list(optim.groups(config, names, names))


def test_shared_experts_are_matrices_too() -> None:
    """Of the model of a run, and those that several ranks share."""
    with Draws(0):
        layer = nn.Sequential(Experts(8, 16, 4, shared=1))
    _, config = parse(["optim.name=muon", "data.global_batch=2"])
    world = World.join("cpu")
    try:
        strategy = Strategy(config, world, Objective(losses.build("mse")))
        example: Any = torch.zeros(2, 3, 8), torch.zeros(2, 3, 8)
        strategy.place(layer, example)
        found: list[Any] = []
        strategy.optimizer(lambda groups: found.extend(groups) or optim.build(config.optim, groups))  # type: ignore[func-returns-value]
    finally:
        world.leave()
    assert {group["optimizer"] for group in found} == {"muon"}
