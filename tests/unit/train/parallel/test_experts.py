"""The layer of experts beside a loop over tokens, and the balance of its loads."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional
from user_code import SIZE, Penalized, half_masked

from rollcall import Experts
from rollcall.config import ConfigError
from rollcall.config.schema import Data
from rollcall.train.checkpoint.tools import export
from rollcall.train.main import main
from rollcall.train.models import activations
from rollcall.train.parallel import experts
from rollcall.train.parallel.experts import Spread
from rollcall.train.weights.deferred import Draws

WIDTH, HIDDEN = 8, 12


def by_hand(layer: Experts, x: torch.Tensor) -> torch.Tensor:
    """Pass each token alone through each of its experts."""

    def perceptron(weights: Any, number: int, token: torch.Tensor) -> torch.Tensor:
        hidden = token @ weights.up[number]
        if weights.gated:
            gate, hidden = hidden.chunk(2)
            hidden = functional.silu(gate) * hidden
        else:
            hidden = functional.gelu(hidden)
        out: torch.Tensor = hidden @ weights.down[number]
        return out

    outputs = []
    most = math.ceil(layer.capacity_factor * x[0, ..., 0].numel() * layer.top_k / layer.number)
    for number, token in enumerate(x.flatten(0, -2)):
        if number % x[0, ..., 0].numel() == 0:
            queues = dict.fromkeys(range(layer.number), 0)  # of a sequence
        logits = layer.router.weight @ token
        scores = logits.softmax(0) if layer.scores == "softmax" else logits.sigmoid()
        chosen = sorted(range(layer.number), key=lambda e: -(scores[e] + layer.bias[e]).item())
        chosen = chosen[: layer.top_k]
        total = sum(scores[e] for e in chosen) if layer.top_k > 1 else 1
        for e in chosen:
            queues[e] += 1
        chosen = [e for e in chosen if queues[e] <= most or not layer.capacity_factor]
        parts = [scores[e] / total * perceptron(layer.perceptrons, e, token) for e in chosen]
        parts.append(torch.zeros_like(token))
        if layer.shared:
            parts.append(perceptron(layer.shared, 0, token))
        outputs.append(torch.stack(parts).sum(0))
    return torch.stack(outputs).view_as(x)


@pytest.mark.parametrize(
    ("top_k", "options"),
    [(1, {}), (2, {"gated": True}), (3, {"scores": "sigmoid"}), (2, {"shared": 2, "gated": True})]
    + [(k, {"capacity_factor": factor}) for k, factor in ((1, 1.0), (2, 1.25), (2, 0.1))],
)
def test_a_layer_equals_a_loop_over_tokens(top_k: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = Experts(WIDTH, HIDDEN, 5, top_k, **options)
    layer.bias += torch.tensor([0.3, 0, -0.3, 0, 9.0])  # one has all tokens, another has few
    x = torch.randn(3, 7, WIDTH, requires_grad=True)
    found, expected = layer(x), by_hand(layer, x)
    torch.testing.assert_close(found, expected)
    weights = [x, *layer.parameters()]
    towards = torch.randn_like(found)
    for mine, theirs in zip(
        torch.autograd.grad((found * towards).sum(), weights),
        torch.autograd.grad((expected * towards).sum(), weights),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_a_token_counts_once_and_padding_never() -> None:
    """Also if a block is computed again, and in an evaluation."""
    torch.manual_seed(0)
    model = nn.Sequential(Experts(WIDTH, HIDDEN, 4), nn.Linear(WIDTH, 1))
    activations.recompute(model, "blocks")
    x, weights = torch.randn(6, WIDTH), torch.tensor([1.0, 1, 1, 1, 0, 0])
    for _ in range(2):  # micro-batches
        (model(x).squeeze(1) * weights).sum().backward()
    model.eval()
    model(x).sum().backward()
    layer: Any = model[0]
    assert int(layer.take_counts().sum()) == 2 * 4 * 2
    assert not layer.take_counts().any()


def test_biases_even_out_the_loads() -> None:
    torch.manual_seed(0)
    layer = Experts(WIDTH, HIDDEN, 4, balance_rate=0.003)
    x = torch.randn(256, WIDTH) + layer.router.weight[0].detach() * 3  # most prefer the first

    def load() -> torch.Tensor:
        layer(x).sum().backward()
        return layer.take_counts()

    before = load()
    for _ in range(300):
        layer.move_biases(load())
    after = load()
    assert before.max() / before.double().mean() > 1.5
    assert after.max() / after.double().mean() < 1.1


class Mesh:
    """A mesh of four ranks, as far as a check asks."""

    def size(self) -> int:
        return 4


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Linear(8, 8), "the mesh has expert=4, but model.name=own has no experts"),
        (Experts(8, 8, 3, 1), "0 has 3 experts, 1 for a rank, which leave none to the last"),
        (Experts(8, 8, 6), "0 has 6 experts, 2 for a rank, which leave none to the last rank of "),
        (Experts(8, 9, 8), "0 has experts of 9 units, which do not divide by the 2 ranks that"),
    ],
)
def test_ranks_without_an_expert_or_with_uneven_shards_are_refused(
    layer: nn.Module, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Spread(Mesh(), 2, "own").check(nn.Sequential(layer), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (["*.stack"], "expert_plan has *.stack, but the model has no such module"),
        (["0"], "expert_plan: expected all weights of 0 to be of itself, with an expert in each"),
        (["0.0"], "expert_plan: expected all weights of 0.0 to be of itself, with an expert in"),
    ],
)
def test_a_plan_of_other_modules_is_refused(plan: list[str], message: str) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8)))
    model.expert_plan = plan  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=re.escape(message)):
        Spread(Mesh(), 2, "own").check(model, None)  # type: ignore[arg-type]


def test_more_experts_for_a_token_than_there_are() -> None:
    with pytest.raises(ValueError, match="top_k=3: expected 1 to 2"):
        Experts(8, 8, 2, 3)


def balanced(model: nn.Sequential) -> experts.Balance:
    layers = {name: (4, layer) for name, layer in model.named_children()}
    return experts.Balance(layers, 1, lambda: 0, lambda: 1.0, True, torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_losses_of_loads_and_of_large_outputs(scores: str) -> None:
    """The gradient is that of the sums in the papers, over sequences that have a gradient."""
    torch.manual_seed(0)
    layer = Experts(WIDTH, HIDDEN, 4, scores=scores, balance_loss=0.3, z_loss=0.2)
    plain = Experts(WIDTH, HIDDEN, 4, scores=scores)
    plain.load_state_dict(layer.state_dict())
    x, counts = torch.randn(3, 7, WIDTH, requires_grad=True), torch.tensor([1.0, 1.0, 0.0])

    def loss(layer: Experts, rows: slice) -> torch.Tensor:
        total: torch.Tensor = (layer(x[rows]).square().mean((1, 2)) * counts[rows]).sum()
        return total

    penalty = torch.zeros(())
    for sequence in x[:2]:
        logits = sequence @ plain.router.weight.T
        affinities = logits.softmax(-1) if scores == "softmax" else logits.sigmoid()
        shares = (affinities / affinities.sum(-1, keepdim=True)).mean(0)
        chosen = affinities.topk(2).indices
        for expert in range(4):
            load = (chosen == expert).sum() * 4 / (2 * 7)
            penalty = penalty + 0.3 * load * shares[expert]
        penalty = penalty + 0.2 * (logits.exp().sum(-1).log() ** 2).mean()
    expected = torch.autograd.grad(
        loss(plain, slice(3)) + penalty, [x, *plain.parameters()], retain_graph=True
    )
    layer.scale = lambda: 1.0
    parts = [[slice(3)], [slice(0, 1), slice(1, 3)]]
    for rows in parts:  # however the batch is cut
        total = torch.stack([loss(layer, part) for part in rows]).sum()
        found = torch.autograd.grad(total, [x, *layer.parameters()])
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs)
    layer.scale = None  # a mean over the samples of a batch
    [mean] = torch.autograd.grad(loss(layer, slice(2)) / 2, [layer.router.weight])
    torch.testing.assert_close(mean, expected[1] / 2)


@pytest.mark.parametrize("loss", ["cross_entropy", "next_token", "user_code:token_losses"])
def test_losses_of_a_router_do_not_depend_on_how_many_targets_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: str
) -> None:
    words = ["data.name=user_code:half_masked", "model.name=user_code:Penalized", "device=cpu"]
    words += ["optim.name=sgd", "optim.lr=1", "optim.momentum=0", "optim.weight_decay=0"]
    words += ["optim.warmup_steps=0", "optim.schedule=constant", "optim.clip_norm=null"]
    words += [f"data.global_batch={SIZE}", "data.micro_batch=7", "train.steps=1"]
    words += [f"train.loss={loss}", f"run.root={tmp_path}", "run.name=it"]
    if loss == "user_code:token_losses":  # its weights are known too late
        assert main(["digits", *words]) == 2
        assert "let the loss return no weights" in capsys.readouterr().err
        return
    assert main(["digits", *words]) == 0
    saved = export.read(tmp_path / "it/checkpoints/step-00000001")["model"]
    with Draws(0):
        model = Penalized()
    split: Any = half_masked(Data(), None).train  # type: ignore[arg-type]
    inputs, targets = split.inputs, split.targets
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    outputs = model(inputs)
    if loss == "next_token":
        outputs, targets = outputs[:, :-1], targets[:, 1:]
    torch.autograd.backward(functional.cross_entropy(outputs.transpose(1, 2), targets))
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        torch.testing.assert_close(saved[name], weights[name] - weight.grad, rtol=1e-5, atol=1e-6)


def test_the_entropy_of_a_router_is_a_mean_over_tokens_that_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(experts, "measure", lambda name, value: measured.update({name: value}))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    torch.manual_seed(0)
    model, x = nn.Sequential(Experts(WIDTH, HIDDEN, 4)), torch.randn(2, 7, WIDTH)
    for rows in (slice(0, 3), slice(3, 5)):  # two micro-batches; the last two tokens are padding
        model(x)[:, rows].sum().backward()
    layer: Any = model[0]
    scores: Any = Categorical(logits=x[:, :5] @ layer.router.weight.T.detach())
    expected = scores.entropy().mean()
    balanced(model).finish(model)
    for name in ("router_entropy", "router_entropy/0"):
        assert float(measured[name]) == pytest.approx(float(expected), abs=2e-6)


def test_the_share_of_tokens_above_the_capacity_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(experts, "measure", lambda name, value: measured.update({name: value}))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    model = nn.Sequential(Experts(WIDTH, HIDDEN, 4, 1, capacity_factor=2.0))
    model[0].bias[2] = 9  # type: ignore[operator]  # all choose this one
    x = torch.randn(3, 8, WIDTH)
    towards = torch.ones(3, 8, WIDTH)
    towards[1, 6:] = 0  # padding, which was dropped too but does not count
    (model(x) * towards).sum().backward()
    balanced(model).finish(model)
    for name in ("dropped_tokens", "dropped_tokens/0"):
        assert float(measured[name]) == pytest.approx(10 / 22)
    model.eval()
    assert model(x).abs().sum(-1).min() > 0  # validation drops none


def test_an_expert_that_no_token_chooses_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experts, "measure", lambda *_: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    model = nn.Sequential(Experts(WIDTH, HIDDEN, 4, balance_rate=0.0))
    model[0].bias[2] = -9  # type: ignore[operator]
    balance = balanced(model)
    for _ in range(experts.DEAD):
        assert capsys.readouterr().err == ""
        model(torch.randn(32, WIDTH)).sum().backward()
        balance.finish(model)
    expected = "warning: no token has chosen 0 2 in the last 100 steps: raise model.balance_rate"
    assert expected in capsys.readouterr().err


def test_experts_before_frozen_weights_alone_are_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their layer has no gradient, which counts tokens."""
    layers = [Experts(WIDTH, HIDDEN, 4), Experts(WIDTH, HIDDEN, 4)]
    model = nn.Sequential(*layers)
    model[0].requires_grad_(False)
    measured: dict[str, float] = {}
    monkeypatch.setattr(experts, "measure", lambda name, value: measured.update({name: value}))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    model(torch.randn(64, WIDTH)).sum().backward()
    balance = balanced(model)
    balance.finish(model)
    assert 1 <= measured["expert_imbalance"] < 4
    assert not measured["idle_experts"]
    assert measured["expert_imbalance/0"] == 0
    assert measured["expert_imbalance/1"] == measured["expert_imbalance"]
    assert not layers[0].bias.any()
