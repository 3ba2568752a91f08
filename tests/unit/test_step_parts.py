"""The parts of a step, each by itself, in this process."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import own
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from train import activations, fp8, models, optim, parallel, speed
from train.config import ConfigError, parse
from train.data.order import Order
from train.data.source import Batch, Source
from train.losses import Objective, per_sample_loss
from train.models import batchnorm
from train.parallel.shard import local_optimizer
from train.precision import Scaler, prepare
from train.run import RunDir
from train.schema import Data, Model
from train.update import Update
from train.world import World


def source(*shape: int) -> Source:
    nothing = TensorDataset()
    return Source(nothing, nothing, 1, 1, shape=shape, classes=10)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], [0.1, 0.1, 0.1, 0.1, 0.1]),
        (["optim.warmup_steps=2"], [0.05, 0.1, 0.1, 0.1, 0.1]),
        (["optim.schedule=linear"], [0.1, 0.08, 0.06, 0.04, 0.02]),
        (["optim.schedule=wsd", "optim.decay_share=0.4"], [0.1, 0.1, 0.1, 0.1, 0.05]),
        (["optim.schedule=linear", "optim.warmup_steps=3"], [0.1 / 3, 0.2 / 3, 0.1, 0.1, 0.05]),
        (["optim.lr_rule=linear", "optim.base_batch=32"], [0.2] * 5),
        (["optim.lr_rule=sqrt", "optim.base_batch=16"], [0.2] * 5),
    ],
)
def test_learning_rates(words: list[str], expected: list[float]) -> None:
    _, config = parse(
        [
            "optim.warmup_steps=0",
            *words,
            "optim.lr=0.1",
            "data.global_batch=64",
            *([] if "schedule" in str(words) else ["optim.schedule=constant"]),
        ]
    )
    rates = [optim.learning_rate(config, step, 5) for step in range(5)]
    assert rates == pytest.approx(expected)


def test_a_rule_needs_the_batch_it_starts_from() -> None:
    with pytest.raises(ConfigError, match="belong together"):
        parse(["optim.lr_rule=linear"])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("resnet18", (1, 8, 8)),
        ("resnet50", (3, 96, 96)),
        ("vit_b_16", (1, 28, 28)),
        ("mobilenet_v3_small", (3, 32, 32)),
    ],
)
def test_torchvision_models_take_small_images(name: str, shape: tuple[int, ...]) -> None:
    with torch.device("meta"):
        model = models.build(Model(name=name), source(*shape))
        assert model(torch.empty(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("resnet18", (64,), "needs images"),
        ("vit_b_16", (3, 32, 16), "square"),
        ("alexnet", (1, 8, 8), "does not work on images of 8×8"),
        ("resnet19", (1, 8, 8), "classification model of torchvision"),
    ],
)
def test_models_that_do_not_fit_are_refused(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message), torch.device("meta"):
        models.build(Model(name=name), source(*shape))


@pytest.mark.parametrize("mode", ["blocks", "selective"])
def test_computing_again_changes_nothing(mode: str) -> None:
    torch.manual_seed(0)
    plain = own.normalised(Model(), source(1, 8, 8))
    other = copy.deepcopy(plain)
    activations.recompute(other, mode)
    x = torch.randn(4, 1, 8, 8)
    for model in (plain, other):
        model(x).square().sum().backward()
    assert plain.state_dict().keys() == other.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]


def test_compiled_blocks_compute_the_same() -> None:
    """Traced, but not translated: inductor's minutes are not spent here."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.GELU()))
    other = copy.deepcopy(plain)
    activations.recompute(other, "blocks")
    models.compile_blocks(other, backend="eager")
    x = torch.randn(4, 8)
    for model in (plain, other):
        model(x).square().sum().backward()
    assert other.state_dict().keys() == plain.state_dict().keys()
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_computing_again_keeps_only_the_inputs_of_blocks() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 100), nn.Linear(100, 8)) for _ in range(3)])
    activations.recompute(model, "blocks")
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(5, 8, requires_grad=True))
    assert kept and max(kept) == 5 * 8


def test_fp8_multiplies_with_two_digits() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    small = copy.deepcopy(plain)
    assert fp8.use(small) == ["2"]
    x = torch.randn(3, 7, 64)
    results = []
    for model in (plain, small):
        inputs = x.clone().requires_grad_()
        out = model[0](inputs).float()
        (out * torch.linspace(-1, 1, 32)).sum().backward()
        results.append([out, inputs.grad, model[0].weight.grad, model[0].bias.grad])
    for expected, found in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        assert 0 < (found - expected).norm() / expected.norm() < 0.1


def test_tf32_is_refused_on_cpus() -> None:
    with pytest.raises(ConfigError, match="number format of NVIDIA GPUs"):
        prepare("tf32", torch.device("cpu"))


@pytest.mark.parametrize(
    "words",
    [
        ["model.sync_batchnorm=true", "parallel.strategy=pipeline"],
        ["model.channels_last=true", "parallel.mesh=shard=2,tensor=2"],
        ["precision=fp8", "parallel.strategy=tensor"],
        ["train.compile=true", "parallel.strategy=dp"],
        ["optim.evaluate_ema=true"],
    ],
)
def test_what_cannot_work_together_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"choose|set"):
        parse(words)


def test_images_lie_pixel_by_pixel() -> None:
    torch.manual_seed(0)
    plain = own.normalised(Model(), source(1, 8, 8)).eval()
    _, config = parse(["model.channels_last=true"])
    other = models.adapt(copy.deepcopy(plain), config, torch.device("cpu"))
    x = torch.randn(4, 1, 8, 8)
    seen: list[torch.Tensor] = []
    other.get_submodule("1").register_forward_hook(lambda *arguments: seen.append(arguments[2]))
    torch.testing.assert_close(other(x), plain(x))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


def test_the_scale_of_fp16_follows_overflows() -> None:
    scaler = Scaler(torch.device("cpu"), interval=2)
    scales = []
    for overflowed in (True, False, False, False, True, False, False):
        scaler.update(torch.tensor(overflowed))
        scales.append(scaler.scale.item() / 2**16)
    assert scales == [0.5, 0.5, 1, 1, 0.5, 0.5, 1]
    scaler.undo()
    assert scaler.state() == {"scale": 2**15, "steps": 1}


def test_a_loss_that_is_not_finite_makes_the_gradient_so() -> None:
    """Also where the loss's own gradient is finite, or its sample weighs nothing."""
    outputs = torch.zeros(2, 10, requires_grad=True)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return per_sample_loss(outputs, targets) + torch.tensor([0, torch.inf])

    losses = Objective(loss)(outputs, torch.tensor([1, 2]))
    (losses * torch.tensor([1, 0])).sum().backward()  # type: ignore[no-untyped-call]
    assert outputs.grad is not None
    assert outputs.grad[0].isfinite().all() and outputs.grad[1].isnan().all()


def test_batchnorm_is_warned_of_where_it_matters() -> None:
    model = own.normalised(Model(), source(1, 8, 8))
    assert "of the 4 ranks" in batchnorm.warning(model, 4, is_cut=False)
    assert "data.micro_batch" in batchnorm.warning(model, 1, is_cut=True)
    assert batchnorm.warning(model, 1, is_cut=False) == ""
    batchnorm.synchronize(model, torch.device("cpu"))
    assert batchnorm.warning(model, 4, is_cut=False) == ""


def test_operations_of_a_transformer_are_counted() -> None:
    config = Model(name="gpt", hidden=64, layers=2, heads=4, kv_heads=4)
    model = models.build(config, source(16))
    rows, length, width = 3, 16, 64
    batch = Batch(torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows), torch.ones(rows))
    per_token = 2 * (4 + 8) * width * width + width * 10  # multiplications of the layers, the head
    attention = 2 * 2 * length * width  # of the scores and of the values, in both blocks
    expected = 6 * rows * length * (per_token + attention)
    assert speed.operations_of(model, batch) == expected


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_to_look_at_the_state_before_the_first_update_changes_nothing(
    tmp_path: Path, name: str
) -> None:
    """As for a save after first steps that were all skipped; momentum and decay are on."""
    _, config = parse([f"optim.name={name}", "optim.weight_decay=0.1", "data.global_batch=8"])
    world = World.join("cpu")
    weights = []
    try:
        for looks in (False, True):
            objective = Objective(per_sample_loss)
            strategy = parallel.build(config, world, objective)
            data = own.numbered(Data(), world)
            torch.manual_seed(0)
            batch = data.train.__getitems__([*range(8)])  # type: ignore[attr-defined]
            strategy.place(own.healthy(Model(), data), batch)
            optimizer = strategy.optimizer(partial(optim.build, config.optim))
            order = Order.of_run(config, data.train_size)
            rest = RunDir(tmp_path, "run"), order, strategy, optimizer, objective
            update = Update(config, world, *rest)
            if looks:
                counts = [value for key, value in update.state()["optim"].items() if "step" in key]
                assert not any(counts) and bool(counts) == (name != "sgd")
            for step in range(3):
                update(batch, step)
            assert local_optimizer(optimizer).state
            weights.append(list(strategy.model.parameters()))
    finally:
        world.leave()
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
