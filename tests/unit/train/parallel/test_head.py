"""The last layer and the loss computed together equal whole logits, which never exist."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from rollcall.config import ConfigError
from rollcall.train.data.source import Batch
from rollcall.train.numerics import cross_entropy, losses
from rollcall.train.parallel import head as module

ROWS, LENGTH, HIDDEN, CLASSES = 3, 13, 8, 101
SMALL = 10 * CLASSES


class Model(nn.Module):
    """An embedding, a layer of its own, and a head that may share the embedding's weight."""

    output_layer = "head"

    def __init__(self, tied: bool = False, change: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(CLASSES, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES, bias=not tied)
        self.change = change
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        scores: torch.Tensor = self.head(self.mix(self.embedding(tokens)))
        return scores if self.change is None else self.change(self, scores)


def _batch() -> Batch:
    tokens = torch.randint(CLASSES, (ROWS, LENGTH))
    targets = torch.randint(CLASSES, (ROWS, LENGTH))
    targets[0, ::3] = -100
    targets[1, :] = -100
    return Batch(tokens, targets, torch.tensor([1.0, 1.0, 0.0]))


def _step(model: Model, loss: losses.Loss, batch: Batch, head: module.Head | None) -> Any:
    objective = losses.Objective(loss)
    objective.seen = []
    model.zero_grad()
    if head:
        with head.scoring(model, batch):
            outputs = head.scored(model(batch.inputs))
        assert isinstance(outputs, losses.Scored)
    else:
        outputs = model(batch.inputs)
    total = objective(outputs, batch.targets, batch.weights)
    (total * 0.3).backward()  # type: ignore[no-untyped-call]
    return (
        total.detach(),
        *objective.seen,
        *objective.weights,
        *(w.grad for w in model.parameters()),
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["cross_entropy", "next_token"])
@pytest.mark.parametrize("args", [{}, {"label_smoothing": 0.1, "z_loss": 0.01}])
@pytest.mark.parametrize("product", [CLASSES, 10 * CLASSES, 2**27])
def test_losses_and_gradients_are_those_of_whole_logits(
    tied: bool, name: str, args: dict[str, float], product: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, batch, loss = Model(tied), _batch(), losses.build(name, args)
    expected = _step(model, loss, batch, None)
    monkeypatch.setattr(cross_entropy, "CHUNK", 3 * CLASSES)
    monkeypatch.setattr(cross_entropy, "PRODUCT", product)
    head = module.find(model, batch, loss)
    assert head and head.fits(batch)
    found = _step(model, loss, batch, head)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()
    assert "forward" not in vars(model.head)


def test_an_evaluation_has_losses_and_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(cross_entropy, "PRODUCT", SMALL)
    monkeypatch.setattr(cross_entropy, "CHUNK", SMALL)
    model, batch = Model(), _batch()
    head = module.find(model, batch, losses.build("cross_entropy", {"z_loss": 0.1}))
    assert head
    with torch.no_grad(), head.scoring(model, batch):
        found = model(batch.inputs)
    logits = model(batch.inputs)
    plain = functional.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none")
    torch.testing.assert_close(found[..., 0], plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[..., 1], (logits.argmax(-1) == batch.targets).float())


def test_16_bits_are_as_close_to_fp32_as_whole_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, batch, loss = Model(), _batch(), losses.build("cross_entropy")
    exact = _step(model, loss, batch, None)
    with torch.autocast("cpu", torch.bfloat16):
        plain = _step(model, loss, batch, None)
        monkeypatch.setattr(cross_entropy, "PRODUCT", SMALL)
        monkeypatch.setattr(cross_entropy, "CHUNK", SMALL)
        found = _step(model, loss, batch, module.Head("head", CLASSES, loss))
    for one, other, wanted in zip(found, plain, exact, strict=True):
        assert one.dtype == other.dtype
        assert (one - wanted).norm() <= 1.5 * (other - wanted).norm() + 1e-6


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers in tensors that are as wide as scores, and alive at once."""

    def __init__(self, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._width, self._sizes = width, dict[int, int]()
        self.most = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else [found]:
            if isinstance(one, torch.Tensor) and one.shape[-1:] == (self._width,):
                storage = one.untyped_storage()
                key = storage._cdata
                if key not in self._sizes:
                    self._sizes[key] = storage.nbytes()
                    weakref.finalize(storage, self._sizes.pop, key, None)
                    self.most = max(self.most, sum(self._sizes.values()))
        return found


@pytest.mark.parametrize("fused", [False, True])
def test_whole_logits_never_exist(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of tensors as wide as the classes: the parts of one product, not those of all."""
    monkeypatch.setattr(cross_entropy, "CHUNK", 4 * CLASSES)
    monkeypatch.setattr(cross_entropy, "PRODUCT", 4 * CLASSES)
    model, batch, loss = Model(), _batch(), losses.build("cross_entropy")
    head = module.find(model, batch, loss) if fused else None
    with _Alive(CLASSES) as alive:
        _step(model, loss, batch, head)
    whole, part = 4 * ROWS * LENGTH * CLASSES, 4 * 4 * CLASSES
    if fused:
        assert part <= alive.most <= 5 * part < whole
    else:
        assert alive.most >= 2 * whole


def _mask(_: nn.Module, scores: torch.Tensor) -> torch.Tensor:
    scores[..., CLASSES - 3 :] = -torch.inf  # classes that fill up the layer
    return scores


def _measure(model: nn.Module, scores: torch.Tensor) -> torch.Tensor:
    model.largest = scores.max()
    return scores


def test_rows_of_one_token_predict_nothing() -> None:
    batch = _batch().map(lambda rows: rows[:, :1] if rows.ndim > 1 else rows)
    loss, model = losses.build("next_token"), Model()
    head = module.find(model, batch, loss)
    head.is_cut = True
    with head.scoring(model, batch):
        found = loss(head.scored(model(batch.inputs)), batch.targets)
    assert not any(map(torch.any, found))


def test_a_model_that_changes_its_scores_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK", 1)
    loss, batch = losses.build("cross_entropy"), _batch()
    wrapped: Any = Model()
    wrapped.head = nn.Sequential(wrapped.head)
    by_rows: Any = Model()
    by_rows.tensor_plan = {"mix": "columns", "he*": "rows"}
    models = (
        (Model(), loss),
        (by_rows, loss),
        (Model(change=lambda _, scores: scores * 0.5), loss),
        (Model(change=lambda _, scores: scores.div_(2)), loss),
        (Model(change=_mask), loss),
        (Model(change=_measure), loss),
        (Model(change=lambda model, x: x if model.training else x.softmax(-1)), loss),
        (wrapped, loss),
        (Model(), losses.build("mse")),
    )
    assert [module.find(m, batch, one).fits(batch) for m, one in models] == [True, *[False] * 8]


def test_a_target_outside_of_the_classes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK", 1)
    model, batch, loss = Model(), _batch(), losses.build("next_token")
    batch.targets[0, 1] = CLASSES
    head = module.find(model, batch, loss)
    with pytest.raises(ConfigError, match=f"a target is {CLASSES}, but the model has {CLASSES}"):
        _step(model, loss, batch, head)
