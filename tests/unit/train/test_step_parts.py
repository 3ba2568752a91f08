"""The parts of a step, each by itself, in this process."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import user_code
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode
from user_tasks import Returned

from rollcall.config import ConfigError, parse
from rollcall.config.schema import Data, Model
from rollcall.records.run_dir import RunDir
from rollcall.train import models
from rollcall.train.data.order import Order
from rollcall.train.data.source import Batch, Source
from rollcall.train.evaluate import evaluate
from rollcall.train.loggers import Callbacks
from rollcall.train.models import activations, batchnorm
from rollcall.train.numerics import fp8, losses, optim
from rollcall.train.numerics.losses import Loss, Objective, per_sample_loss
from rollcall.train.numerics.model_loss import ModelLoss
from rollcall.train.numerics.precision import Scaler, prepare
from rollcall.train.numerics.schedules import Schedule
from rollcall.train.parallel.pipeline import check_shared
from rollcall.train.parallel.shard import local_optimizer
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.profiling import flops
from rollcall.train.ranks.run import Run
from rollcall.train.ranks.world import World
from rollcall.train.recovery.nonfinite import Witness
from rollcall.train.recovery.spikes import Spikes
from rollcall.train.state import Buffers, TrainingState
from rollcall.train.step import Gradient, Numbers, Updater
from rollcall.train.trainer import no_collection


def source(*shape: int) -> Source:
    nothing = TensorDataset()
    return Source(nothing, nothing, 1, 1, shape=shape, classes=10)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], [0.1, 0.1, 0.1, 0.1, 0.1]),
        (["optim.warmup_steps=2"], [0.05, 0.1, 0.1, 0.1, 0.1]),
        (["optim.schedule=linear"], [0.1, 0.08, 0.06, 0.04, 0.02]),
        (["optim.schedule=wsd", "optim.decay_fraction=0.4"], [0.1, 0.1, 0.1, 0.1, 0.05]),
        (["optim.schedule=linear", "optim.warmup_steps=3"], [0.1 / 3, 0.2 / 3, 0.1, 0.1, 0.05]),
        (["optim.lr_scaling=linear", "optim.base_batch=32"], [0.2] * 5),
        (["optim.lr_scaling=sqrt", "optim.base_batch=16"], [0.2] * 5),
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
    rates = [Schedule(config)(step, 5) for step in range(5)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(("name", "is_fused"), [("adamw", True), ("sgd", False)])
def test_adam_is_fused_on_cpus_but_not_what_takes_sparse_gradients(
    name: str, is_fused: bool
) -> None:
    momentum = [] if is_fused else ["optim.momentum=0"]
    _, config = parse([f"optim.name={name}", "optim.weight_decay=0", *momentum])
    weights = nn.Embedding(3, 2, sparse=not is_fused)
    optimizer = optim.build(config.optim, [{"params": list(weights.parameters())}])
    assert bool(optimizer.defaults["fused"]) == is_fused
    optimizer.param_groups[0]["lr"] = 0.1
    weights(torch.tensor([1])).sum().backward()
    before = weights.weight.detach().clone()
    optimizer.step()
    assert (weights.weight != before).any(1).tolist() == [False, True, False]


def test_training_does_not_thaw_what_the_parent_of_the_ranks_froze() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with no_collection():
            assert not gc.isenabled()
        assert (gc.isenabled(), gc.get_freeze_count()) == (True, before)
    finally:
        gc.unfreeze()


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
        ("resnet18", (64,), "expects images"),
        ("vit_b_16", (3, 32, 16), "square"),
        ("alexnet", (1, 8, 8), "does not work on images of 8×8"),
        ("resnet19", (1, 8, 8), "unknown 'resnet19', did you mean 'resnet18'"),
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
    plain = user_code.with_batchnorm(Model(), source(1, 8, 8))
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
    fp8.use(small)
    assert type(small[0]) is fp8.Linear and type(small[2]) is nn.Linear
    x = torch.randn(3, 7, 64)
    results = []
    for model in (plain, small):
        inputs = x.clone().requires_grad_()
        out = model[0](inputs).float()
        (out * torch.linspace(-1, 1, 32)).sum().backward()
        results.append([out, inputs.grad, model[0].weight.grad, model[0].bias.grad])
    # Rounding moves a number by up to 2^-4 of its size in e4m3 and by up to 2^-3 in e5m2; the root
    # mean square is 1/sqrt(3) of that. Independent errors add as squares, in a product as in a sum:
    # sqrt(2^-8 + 2^-6) / sqrt(3) = 0.08 of the result, give or take 12 % with 32 of them.
    for expected, found in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        assert 0 < (found - expected).norm() / expected.norm() < 0.1


def test_tf32_is_refused_on_cpus() -> None:
    with pytest.raises(ConfigError, match="expected an NVIDIA GPU, got device cpu"):
        prepare("tf32", torch.device("cpu"))


@pytest.mark.parametrize(
    "words",
    [
        ["model.sync_batchnorm=true", "parallel.strategy=pipeline"],
        ["model.channels_last=true", "parallel.mesh=shard=2,tensor=2"],
        ["precision=fp8", "parallel.strategy=tensor"],
        ["train.compile=true", "parallel.strategy=dp"],
        ["optim.evaluate_ema=true"],
        ["optim.lr_scaling=linear"],
    ],
)
def test_what_cannot_work_together_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"choose|set"):
        parse(words)


def test_images_lie_pixel_by_pixel() -> None:
    torch.manual_seed(0)
    plain = user_code.with_batchnorm(Model(), source(1, 8, 8)).eval()
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

    objective = Objective(Loss("own", loss))
    batch = outputs, torch.tensor([1, 2]), torch.tensor([1, 0])
    objective(*batch).backward()  # type: ignore[no-untyped-call]
    assert outputs.grad is not None and outputs.grad.isnan().all()


def test_batchnorm_is_warned_of_where_it_matters() -> None:
    model = user_code.with_batchnorm(Model(), source(1, 8, 8))
    assert "of the 4 ranks" in batchnorm.warning(model, 4, 8, is_cut=False)
    assert "data.micro_batch" in batchnorm.warning(model, 1, 8, is_cut=True)
    assert batchnorm.warning(model, 1, 8, is_cut=False) == ""
    batchnorm.synchronize(model, torch.device("cpu"))
    assert batchnorm.warning(model, 4, 8, is_cut=False) == ""
    assert "a multiple of 4" in batchnorm.warning(model, 4, 10, is_cut=False)


def test_operations_of_a_transformer_are_counted() -> None:
    config = Model(name="gpt", hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=4)
    model = models.build(config, source(16))
    rows, length, width = 3, 16, 64
    batch = Batch(torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows), torch.ones(rows))
    per_token = 2 * (4 + 8) * width * width + width * 10  # multiplications of the layers, the head
    attention = 2 * 2 * length * width  # of the scores and of the values, in both blocks
    expected = 2 * rows * length * (per_token + attention)
    plain = flops.operations_of(model, batch)
    assert plain == (expected, 2 * expected, 0)
    counted = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counted:
        model(batch.inputs).sum().backward()
    assert counted.get_total_flops() == plain.forward + plain.backward
    activations.recompute(model, "blocks")
    # The last product of a block is not repeated: the backward pass does not need its result.
    again = 2 * rows * length * (2 * (4 + 4) * width * width + attention)
    assert flops.operations_of(model, batch) == (expected, 2 * expected, again)


def test_operations_of_a_perceptron_are_counted() -> None:
    """Its first layer needs no gradient of its inputs."""
    model = models.build(Model(name="mlp", hidden_size=32, num_layers=2), source(1, 8, 8))
    batch = Batch(torch.zeros(5, 1, 8, 8), torch.zeros(5), torch.ones(5))
    sizes = [layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear)]
    forward = 2 * 5 * sum(sizes)
    assert flops.operations_of(model, batch) == (forward, 2 * forward - 2 * 5 * sizes[0], 0)
    counted = FlopCounterMode(display=False)
    with counted:
        model(batch.inputs).sum().backward()
    assert counted.get_total_flops() == 3 * forward - 2 * 5 * sizes[0]


def test_the_peak_of_a_chip(tmp_path: Path) -> None:
    assert flops.peak_of("NVIDIA H100 80GB HBM3", "bf16") == 989e12
    assert flops.peak_of("NVIDIA H100 PCIe", "bf16") == 756e12
    assert flops.peak_of("NVIDIA GB200", "bf16") == 2500e12
    assert flops.peak_of("NVIDIA L40", "fp32") is None  # not an L4
    assert flops.peak_of("Tesla V100-SXM2-16GB", "bf16") is None
    own = tmp_path / "chips.yaml"
    own.write_text("EPYC 9654: {fp32: 5.4e12}\nH100: {bf16: 1e15}\n")
    assert flops.peak_of("AMD EPYC 9654 96-Core Processor", "fp32", str(own)) == 5.4e12
    assert flops.peak_of("NVIDIA H100 80GB HBM3", "bf16", str(own)) == 1e15
    for text in ("just words", "H100: fast", "H100: {bf16: much}", "{"):
        own.write_text(text)
        with pytest.raises(ConfigError, match="expected a YAML file of chips"):
            flops.peak_of("any", "fp32", str(own))


def one_step(
    run: Run,
    order: Order,
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    objective: Objective,
) -> Callable[[Batch, int], Numbers]:
    """Return a function that makes a step with a batch, of which a first gradient is dropped."""
    state = TrainingState(run, strategy, optimizer, objective)
    gradient, updater = Gradient(run, order, state), Updater(run, order, state)

    def one(batch: Batch, number: int) -> Numbers:
        gradient.compute(batch, number)
        gradient.drop()
        gradient.compute(batch, number)
        updater.apply(gradient, number)
        return updater.report()

    return one


def test_targets_that_do_not_count(tmp_path: Path) -> None:
    """The loss, the norm, the update and the evaluation are plain PyTorch's; none may count."""
    words = ["optim.name=sgd", "optim.lr=1", "optim.weight_decay=0", "optim.momentum=0"]
    _, config = parse([*words, "optim.warmup_steps=0", "optim.schedule=constant"])
    world = World.join("cpu")
    try:
        data = user_code.numbered_samples(Data(), world)
        batch = data.train.__getitems__([*range(50)])  # type: ignore[attr-defined]
        inputs, targets = batch.inputs, batch.targets
        targets[:30] = -100
        data.validation.targets[:5] = -100  # type: ignore[attr-defined]
        objective = Objective(losses.build(config.train.loss))
        strategy = Strategy(config, world, objective)
        model = user_code.healthy(Model(), data)
        plain = copy.deepcopy(model)
        strategy.place(model, batch)
        optimizer = strategy.optimizer(partial(optim.build, config.optim))
        run = Run(config, world, RunDir(tmp_path, "run"))
        step_of = one_step(run, Order(50, 100, 50, 0), strategy, optimizer, objective)
        expected = nn.functional.cross_entropy(plain(inputs), targets)
        expected.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm([one.grad for one in plain.parameters()])  # type: ignore[misc]
        found: Any = step_of(batch, 1)
        torch.testing.assert_close(found.loss / found.count, expected)
        torch.testing.assert_close(found.grad_norm, norm)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other - torch.as_tensor(other.grad))
        sizes: list[int] = []
        hook = model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
        result = evaluate(strategy, data, config, micro_batch=7)
        hook.remove()
        assert max(sizes) == 7  # no more than a step has at once
        rows: Any = data.validation
        with torch.no_grad():
            outputs = model(rows.inputs)
        counted = rows.targets >= 0
        right = (outputs.argmax(-1) == rows.targets)[counted].float().mean()
        assert result is not None
        assert result["accuracy"] == pytest.approx(right.item())
        mean = nn.functional.cross_entropy(outputs, rows.targets)
        assert result["loss"] == pytest.approx(mean.item())
        before = copy.deepcopy(model.state_dict())
        targets[:] = -100
        found = step_of(batch, 2)
        assert (found.loss, found.grad_norm, found.skipped, found.count) == (0, 0, 0, 0)
        assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
        rows.targets[:] = -100
        with pytest.raises(ConfigError, match="no target of the validation data counts"):
            evaluate(strategy, data, config)
        # The first targets that do not count, in a gradient that was dropped and computed again.
        targets[:30] = 0
        assert step_of(batch, 2).count == 30
        targets[:] = 0
        assert step_of(batch, 2).count == 50
    finally:
        world.leave()


def test_only_a_multiple_of_a_positive_loss_is_a_spike() -> None:
    world = World.join("cpu")
    try:
        for means, found in (([0, 2, 3, 11], [0, 0, 0, 1]), ([-3, -2, -1], [0, 0, 0])):
            spikes = Spikes(5, world.device)
            steps = [
                spikes.found(torch.tensor(3.0 * mean), 3, torch.tensor(False)) for mean in means
            ]
            assert [*map(int, steps)] == found
    finally:
        world.leave()


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that compute something."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_buffers_are_kept_and_restored_by_a_few_kernels() -> None:
    """As many for many layers as for one, whether they are restored or not."""
    counts = set()
    for layers in (1, 20):
        model = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(layers)))
        buffers = Buffers(model)
        kernels = Kernels()  # type: ignore[no-untyped-call]
        for is_bad in (True, False):
            kernels.count = 0
            before = [one.clone() for one in buffers.now()]
            with kernels:
                buffers.keep()
            model(torch.full((4, 3), torch.nan))
            after = [one.clone() for one in buffers.now()]
            with kernels:
                buffers.restore(torch.tensor(is_bad))
            expected = before if is_bad else after
            for found, wanted in zip(buffers.now(), expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
            counts.add(kernels.count)
    assert len(counts) == 1 and max(counts) < 12


def test_a_buffer_that_a_forward_pass_replaces_is_restored() -> None:
    model = nn.BatchNorm1d(2)
    buffers = Buffers(model)
    for is_skipped, expected in ((True, 0), (False, 7)):
        buffers.keep()
        model.running_mean = torch.full((2,), 7.0)
        buffers.restore(torch.tensor(is_skipped))
        assert model.running_mean.tolist() == [expected] * 2


class Returning(nn.Module):
    """Returns the mean cross entropy of its rows, shifted by `shift` places, and the rows."""

    def __init__(self, shift: int, scale: float = 1.0) -> None:
        super().__init__()
        self.shift = shift
        self.table = nn.Parameter(scale * torch.linspace(-1, 1, 42).sin().view(7, 6))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Returned:
        logits = self.table[inputs]
        scores = logits[:, : -self.shift] if self.shift else logits
        wanted = labels[:, 1:] if self.shift else labels
        mean = nn.functional.cross_entropy(scores.flatten(0, -2), wanted.flatten())
        return Returned(mean, logits)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_models_own_mean_becomes_a_sum(shift: int) -> None:
    model, loss = Returning(shift), ModelLoss()
    rows = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 1], [2, 2, 5, 3]])
    labels = (rows * 5 % 6).masked_fill(torch.arange(4) > torch.tensor([[1], [3], [2]]), -100)
    total, weight = loss(model, {"inputs": rows, "labels": labels})
    assert weight == 9 - 3 * shift
    parts = [loss(model, {"inputs": rows[[n]], "labels": labels[[n]]}) for n in range(3)]
    assert sum(part[0].item() for part in parts) == pytest.approx(total.item(), rel=1e-6)
    none, weight = loss(model, {"inputs": rows, "labels": torch.full_like(labels, -100)})
    none.backward()  # type: ignore[no-untyped-call]
    assert none == 0 and weight == 0 and model.table.grad is not None
    assert not model.table.grad.any()
    one = ModelLoss()(Returning(0), {"inputs": rows[:, 0], "label": labels[:, 0]})  # a class each
    assert one[1] == 3
    with pytest.raises(ConfigError, match="not known to be a mean"):  # all scores are equal
        ModelLoss()(Returning(shift, 0.0), {"inputs": rows, "labels": labels})
    assert ModelLoss("rows")(Returning(0, 0.0), {"inputs": rows, "labels": labels})[1] == 3


def test_an_evaluation_leaves_every_module_in_its_mode() -> None:
    """An author may have frozen the batch normalization of a pretrained part with `eval()`."""
    _, config = parse(["model.name=user_code:with_batchnorm"])
    world = World.join("cpu")
    try:
        strategy = Strategy(config, world, Objective(losses.build(config.train.loss)))
        model = user_code.with_batchnorm(Model(), source(1, 8, 8))
        frozen = next(each for each in model.modules() if isinstance(each, nn.BatchNorm2d))
        frozen.eval()
        before = [each.training for each in model.modules()]
        batch = Batch(torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.long), torch.ones(4))
        strategy.place(model, batch)
        strategy.forward(batch)
        assert [each.training for each in model.modules()] == before
    finally:
        world.leave()


def test_bytes_are_no_negative_targets() -> None:
    assert losses.valid_share(torch.tensor([156, 3], dtype=torch.uint8)).tolist() == [1, 1]


def test_padded_numbers_are_refused_where_they_would_count() -> None:
    loss, rows = losses.build("mse", by_target=True, source="mine"), torch.zeros(3)
    for one in (rows, rows[:, None]):  # a number for each row
        assert loss(one, one + 1)[0].tolist() == [1, 1, 1]
    with pytest.raises(ConfigError, match=r"targets of shape \(3, 5\) \(data.pad, data.name=mine"):
        loss(torch.zeros(3, 5), torch.zeros(3, 5))


def test_torch_cannot_split_the_gradient_of_a_shared_weight() -> None:
    """If this fails, check_shared need not refuse such models any longer."""
    model = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4), nn.RMSNorm(4))
    model[2].weight = model[0].weight
    x = torch.randn(2, 4, requires_grad=True)
    _, groups = stage_backward_input([model(x).sum()], None, [x], model.parameters())
    with pytest.raises(RuntimeError, match="second time"):
        stage_backward_weight(model.parameters(), groups)
    with pytest.raises(ConfigError, match=r"0.weight and 2.weight share a weight"):
        check_shared("zero-bubble", model)
    check_shared("1f1b", model)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "NAdam", "Rprop", "ASGD", "muon"])
def test_to_look_at_the_state_before_the_first_update_changes_nothing(
    tmp_path: Path, name: str
) -> None:
    """As for a save after first steps that were all skipped; momentum and decay are on."""
    words = [f"optim.name={name}", "optim.weight_decay=0.1", "optim.warmup_steps=0"]
    _, config = parse([*words, "data.global_batch=8"])
    world = World.join("cpu")
    weights = []
    try:
        for looks in (False, True):
            objective = Objective(losses.build(config.train.loss))
            strategy = Strategy(config, world, objective)
            data = user_code.numbered_samples(Data(), world)
            torch.manual_seed(0)
            batch = data.train.__getitems__([*range(8)])  # type: ignore[attr-defined]
            strategy.place(user_code.healthy(Model(), data), batch)
            optimizer = strategy.optimizer(partial(optim.build, config.optim))
            order = Order.of_run(config, data)
            run = Run(config, world, RunDir(tmp_path, "run"))
            step_of = one_step(run, order, strategy, optimizer, objective)
            if looks:
                whole = TrainingState(run, strategy, optimizer, objective).read()
                state = whole["optim"].items()
                counts = [value for key, value in state if key.endswith(".step")]
                assert not any(counts) and bool(counts) == (name != "sgd")
            for step in range(3):
                step_of(batch, step + 1)
            assert local_optimizer(optimizer).state
            weights.append(list(strategy.model.parameters()))
    finally:
        world.leave()
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


class Estimating(torch.optim.SGD):
    """Keeps a number that it changes among its options, as Prodigy does."""

    def __init__(self, params: Any, lr: float, scale: float = 1.0, **options: Any) -> None:
        super().__init__(params, lr, **options)
        for group in self.param_groups:
            group.update(scale=scale, seen=0)
        self.defaults.update(scale=scale, seen=0)


@pytest.mark.parametrize(
    ("name", "option"),
    [("adamw", "betas"), ("muon", "ns_steps"), (f"{__name__}:Estimating", "scale")],
)
def test_a_resumed_run_uses_its_own_options_of_the_optimizer(name: str, option: str) -> None:
    before = [f"optim.args.{option}={ {'betas': [0.5, 0.6]}.get(option, 2) }"]
    after = ["optim.weight_decay=0.7", 'optim.groups={"*.bias": {weight_decay: 0.3}}']
    if name != "adamw":  # of torch's optimizers, a removed option gets its default again
        after.append(f"optim.args.{option}=3")
    world, found = World.join("cpu"), []
    try:
        for words in ([*before, 'optim.groups={"*.bias": {weight_decay: 0}}'], after):
            _, config = parse([f"optim.name={name}", *words])
            strategy = Strategy(config, world, Objective(losses.build("cross_entropy")))
            data = user_code.numbered_samples(Data(), world)
            strategy.place(
                user_code.healthy(Model(), data),
                data.train.__getitems__([0, 1]),  # type: ignore[attr-defined]
            )
            found.append((strategy, strategy.optimizer(partial(optim.build, config.optim))))
    finally:
        world.leave()
    (first, saved), (second, resumed) = found
    for group in saved.param_groups:
        group.update({"seen": 5} if "seen" in group else {})
    wanted = [dict(group) for group in resumed.param_groups]
    second.load_state(resumed, copy.deepcopy(first.state(saved)))
    for group, new in zip(resumed.param_groups, wanted, strict=True):
        assert group.get("seen", 5) == 5
        assert {**group, "seen": 5} == {**new, "seen": 5}


class KeepsAMask(nn.Module):
    """Makes a tensor in its first call, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mask: torch.Tensor | None = None
        self.by_length: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones_like(x)
        scale = self.by_length.setdefault(len(x), torch.ones_like(x))
        return self.layer(x) * self.mask * scale  # type: ignore[no-any-return]


def test_numbers_in_nested_outputs_are_looked_at() -> None:
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *call: {"all": (call[-1], [call[-1] / 0])})
    with Witness(model, Objective(Loss("own", per_sample_loss))) as witness:
        model(torch.zeros(1, 2))
    assert witness.finding().place == "the output of the model"


def test_counting_operations_changes_nothing_of_the_model() -> None:
    model = KeepsAMask()
    batch = Batch(torch.ones(2, 4), torch.zeros(2), torch.ones(2))
    assert flops.operations_of(model, batch) == (64, 64, 0)
    assert model.mask is None
    assert model.by_length == {}
    assert model(batch.inputs).device.type == "cpu"


def test_a_logger_that_fails_ends_neither_the_run_nor_other_loggers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ConnectionError("no answer\nfrom the server")

    run = Run(parse([])[1], cast("World", SimpleNamespace(is_main=True)), RunDir(tmp_path, "run"))
    run.run_dir.create()
    callbacks, calls = Callbacks(run), list[object]()
    other = SimpleNamespace(logged=lambda *what: calls.append(what), close=lambda: calls.append(""))
    bad = SimpleNamespace(logged=fail, close=fail)
    members = {"log.to.bad": bad, "log.to.other": other, "train.callbacks.bad": bad}
    monkeypatch.setattr(callbacks, "_members", {**members, "train.callbacks.bad": other})
    callbacks.logged(1, {"loss": 2.0})
    callbacks.close()
    assert calls == [(1, {"loss": 2.0}), (1, {"loss": 2.0}), "", ""]
    [event] = run.run_dir.read_events("logger_failed")
    assert event["logger"] == "log.to.bad"
    said = "rollcall: log.to.bad failed: ConnectionError: no answer; the run continues, and "
    assert capsys.readouterr().out == f"{said}metrics.jsonl has every line\n"
    monkeypatch.setattr(callbacks, "_members", members)
    with pytest.raises(ConnectionError):
        callbacks.close()
    assert calls[4:] == [""]


def test_a_callback_may_report_numbers_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks = Callbacks(cast("Run", None))
    numbers = {"a": np.float32(1.5), "b": np.int64(2), "c": torch.ones(()), "d": True}
    monkeypatch.setattr(callbacks, "_members", {"x": SimpleNamespace(report=lambda: numbers)})
    assert callbacks.report() == {("x", name): value for name, value in numbers.items()}
