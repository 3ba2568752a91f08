"""Cross entropy in chunks equals torch's, and keeps no copy of the scores."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from rollcall.config import ConfigError
from rollcall.train.numerics import cross_entropy as module
from rollcall.train.numerics import losses

TOKENS, CLASSES = 37, 101


def reference(
    scores: torch.Tensor, targets: torch.Tensor, smoothing: float, z_loss: float
) -> torch.Tensor:
    scores = scores.float()
    plain = functional.cross_entropy(scores, targets, reduction="none", label_smoothing=smoothing)
    return plain + z_loss * scores.logsumexp(-1).square() * (targets != -100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 0.1)])
def test_losses_and_gradients_are_those_of_torch(
    dtype: torch.dtype, smoothing: float, z_loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = (5 * torch.randn(TOKENS, CLASSES, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(CLASSES, (TOKENS,), generator=generator)
    targets[::5] = -100
    factors = torch.rand(TOKENS, generator=generator)
    expected = reference(scores, targets, smoothing, z_loss)
    (wanted,) = torch.autograd.grad((expected * factors).sum(), scores)
    for chunk in (CLASSES - 1, 10 * CLASSES, 2**25):  # a token, ten tokens and a rest, all
        monkeypatch.setattr(module, "CHUNK", chunk)
        found = losses.per_sample_loss(scores, targets, smoothing, z_loss)
        (gradient,) = torch.autograd.grad((found * factors).sum(), scores)
        assert found.dtype == torch.float32 and gradient.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            gradient, wanted, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-7
        )


def test_only_the_scores_in_16_bits_and_a_number_per_token_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CHUNK", CLASSES)
    scores = torch.randn(2, TOKENS, CLASSES, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(CLASSES, (2, TOKENS))
    kept: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):  # type: ignore[func-returns-value]
        losses.build("next_token")(scores, targets)
    assert all(one.numel() <= 2 * TOKENS for one in kept if one.dtype != torch.bfloat16)


def test_a_target_outside_of_the_classes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 1)
    for wrong in (CLASSES, -1):
        targets = torch.tensor([[0, wrong]])
        with pytest.raises(ConfigError, match=f"a target is {wrong}, but the model has 101"):
            losses.build("cross_entropy")(torch.zeros(1, 2, CLASSES), targets)


def test_an_evaluation_neither_smooths_nor_adds() -> None:
    scores, targets = torch.randn(4, CLASSES), torch.arange(4)
    loss = losses.build("cross_entropy", {"label_smoothing": 0.1, "z_loss": 0.1})
    plain = functional.cross_entropy(scores, targets, reduction="none")
    with torch.no_grad():
        torch.testing.assert_close(loss(scores, targets)[0], plain)
    expected = reference(scores, targets, 0.1, 0.1)
    torch.testing.assert_close(loss(scores, targets)[0], expected)
