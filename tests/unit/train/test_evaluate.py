from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollcall.config import ConfigError, parse
from rollcall.train.data.source import Batch
from rollcall.train.evaluate import _hits, in_words
from rollcall.train.numerics import metrics
from rollcall.train.numerics.losses import Loss
from rollcall.train.task import Patience


def test_hits_among_the_best() -> None:
    outputs = torch.arange(30.0).expand(3, 30)  # the last class is the likeliest
    targets = torch.tensor([29, 25, 24])
    assert _hits(outputs, targets, 1).tolist() == [1, 0, 0]
    assert _hits(outputs, targets, 5).tolist() == [1, 1, 0]
    sequences = _hits(outputs.expand(2, 3, 30), targets.expand(2, 3), 5)
    assert sequences.tolist() == [2, 2]


def test_only_figures_that_suit_the_data_are_told() -> None:
    text = in_words({"loss": 1.0, "accuracy": 0.5, "perplexity": 2.71828})
    assert text == "loss 1.0000  accuracy 50.00%  perplexity 2.72"
    assert "top5 75.00%" in in_words({"loss": 2.0, "accuracy": 0.5, "top5": 0.75})


@pytest.mark.parametrize(
    ("losses", "stops"),
    [
        ([3, 2, 2], False),
        ([3, 2, 2, 2], True),
        ([math.nan, 3, 2, 1], False),
        ([math.nan] * 3, True),
    ],
)
def test_patience_counts_evaluations_since_the_best(losses: list[float], stops: bool) -> None:
    run: Any = SimpleNamespace(config=parse(["train.stop_after=2"])[1])
    patience = Patience(run)
    for step, loss in enumerate(losses):
        patience.add(step, {"loss": loss})
    assert bool(patience.reason) is stops


def test_figures_of_the_user_replace_none_of_the_run() -> None:
    own = "train.metrics={%s: 'user_tasks:margin'}"
    assert [*metrics.build(parse([own % "accuracy"])[1].train)] == ["accuracy"]
    with pytest.raises(ConfigError, match=r"metrics.loss: the name loss is taken; .* my_loss"):
        metrics.build(parse([own % "loss"])[1].train)

    def loss(model: Any, batch: Any) -> Any:
        return model, batch.sum(), {"perplexity": (1, 1)}

    one = torch.ones(1)
    with pytest.raises(ConfigError, match="the name perplexity is taken"):
        Loss("mine", loss).of_model(one, Batch(one, (), one))  # type: ignore[arg-type]
