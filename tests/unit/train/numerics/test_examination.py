"""Draws of random numbers in the check before the first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from rollcall.train.numerics.examination import examined


@pytest.mark.parametrize(("dropout", "is_random"), [(0.0, False), (0.5, True)])
@pytest.mark.parametrize("has_mask", [False, True])
def test_attention_draws_only_with_dropout(dropout: float, is_random: bool, has_mask: bool) -> None:
    query = torch.randn(1, 2, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool).tril() if has_mask else None
    with examined(nn.Identity(), None, torch.device("cpu")) as seen:
        functional.scaled_dot_product_attention(query, query, query, mask, dropout)
    assert (seen.is_random, seen.has_drawn) == (is_random, False)
