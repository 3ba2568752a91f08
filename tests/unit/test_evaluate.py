from __future__ import annotations

import pytest
import torch

from train.evaluate import Evaluation, _hits


def test_hits_among_the_best() -> None:
    outputs = torch.arange(30.0).expand(3, 30)  # the last class is the likeliest
    targets = torch.tensor([29, 25, 24])
    assert _hits(outputs, targets, 1).tolist() == [1, 0, 0]
    assert _hits(outputs, targets, 5).tolist() == [1, 1, 0]
    sequences = _hits(outputs.expand(2, 3, 30), targets.expand(2, 3), 5)
    assert sequences.tolist() == pytest.approx([2 / 3, 2 / 3])


def test_only_figures_that_suit_the_data_are_told() -> None:
    text = Evaluation(loss=1.0, accuracy=0.5, perplexity=2.71828)
    assert str(text) == "loss 1.0000  accuracy 50.00%  perplexity 2.72"
    assert text.figures() == {"loss": 1.0, "accuracy": 0.5, "perplexity": 2.71828}
    assert str(Evaluation(loss=0.25)) == "loss 0.2500"
    assert "top 5 75.00%" in str(Evaluation(loss=2.0, accuracy=0.5, top5=0.75))
