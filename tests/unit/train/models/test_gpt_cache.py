"""A transformer with a cache computes the logits that it computes without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollcall.config.schema import Model
from rollcall.train.models.gpt import Cache, gpt

LENGTH = 24


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("pieces", [[24], [10, 14], [7, *[1] * 17], [1, 5, 1, 17]])
def test_logits_are_equal(kv_heads: int, pieces: list[int]) -> None:
    torch.manual_seed(0)
    source: Any = SimpleNamespace(shape=(LENGTH,), classes=50)
    settings = Model(hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=kv_heads)
    model: Any = gpt(settings, source).eval()
    cache = Cache()
    torch.nn.init.normal_(model.embedding.weight)
    ids = torch.randint(50, (3, LENGTH))
    with torch.no_grad():
        found = torch.cat([model(piece, cache=cache) for piece in torch.split(ids, pieces, 1)], 1)
        expected = model(ids)
    assert cache.length == LENGTH
    assert expected.std() > 0.1
    assert (found - expected).abs().max() < 1e-5
