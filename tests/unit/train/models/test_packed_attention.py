"""Attention within packed rows: the blocks of the kernel for GPUs, and no mask in memory."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from rollcall.config import parse
from rollcall.train import models
from rollcall.train.data.packing import same_row
from rollcall.train.data.source import Source
from rollcall.train.models import packed

ROWS = [[100, 57, 130, 13], [3, 290, 7], [300], [1] * 30 + [270]]


def _positions() -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ROWS])


@pytest.mark.parametrize("size", [25, 32, 128])
def test_blocks_are_those_of_the_mask(size: int) -> None:
    """Those with a pair that may attend are needed; those with no other pair need no look."""
    positions = _positions()
    mask, length = same_row(positions).tril()[:, 0], positions.shape[1]
    count = -(-length // size)
    padded = functional.pad(mask, (0, count * size - length) * 2)
    cut = padded.view(len(mask), count, size, count, size)
    some, every = cut.any(4).any(2), cut.all(4).all(2)
    made: Any = packed.blocks(positions, size)
    parts = _dense(made.kv_num_blocks, made.kv_indices)
    whole = _dense(made.full_kv_num_blocks, made.full_kv_indices)
    assert torch.equal(whole, every) and torch.equal(parts | whole, some)
    assert not (parts & whole).any()


def _dense(counts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(places.shape[0], *places.shape[2:], dtype=torch.bool)
    for row, query in torch.cartesian_prod(*map(torch.arange, found.shape[:2])).tolist():
        found[row, query, places[row, 0, query, : counts[row, 0, query]].long()] = True
    return found


@pytest.mark.filterwarnings("ignore")  # it is slow without a GPU
def test_attention_of_blocks_is_that_of_the_mask() -> None:
    torch.manual_seed(0)
    positions, wide = _positions(), (len(ROWS), 4, 300, 16)
    query, (key, value) = torch.randn(wide), torch.randn(2, len(ROWS), 2, 300, 16)
    expected = packed.attend(query, key, value, same_row(positions).tril())
    found = flex_attention(query, key, value, block_mask=packed.blocks(positions), enable_gqa=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the bytes of the largest new tensor."""

    most = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.most = max(self.most, found.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize(
    ("name", "capability"), [("gpt", (9, 0)), ("llama", (8, 0)), ("gpt", (7, 0))]
)
def test_no_mask_is_in_memory_on_gpus(
    name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On fake tensors of a GPU, whose kernel gets heads unchanged; others have the mask."""
    length, masks = 4096, list[Any]()

    def kernel(query: Any, key: Any, value: Any, block_mask: Any, enable_gqa: bool) -> Any:
        assert enable_gqa and key.shape[1] == value.shape[1] == 2
        masks.append(block_mask)
        return query * key.mean() * value.mean()

    monkeypatch.setattr(packed, "_kernel", lambda: kernel)
    monkeypatch.setattr(packed, "find_spec", lambda _: "triton")
    monkeypatch.setattr(shutil, "which", lambda _: "cc")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    packed._compiles.cache_clear()
    words = [f"model.name={name}", "model.num_layers=2", "model.num_heads=4"]
    config = parse(["digits", *words, "model.num_kv_heads=2", "model.hidden_size=64"])[1]
    for device in ("cuda", "cpu"):
        with FakeTensorMode(), torch.device(device), _Largest() as seen:  # type: ignore[no-untyped-call]
            none: Any = [0]
            source = Source(none, none, shape=(length,), classes=32)
            model = models.build(config.model, source)
            tokens = torch.zeros(1, length, dtype=torch.long)
            model(tokens, torch.zeros_like(tokens))
        assert (seen.most < length**2) == (device == "cuda" and capability >= (8, 0))
    assert [type(one) for one in masks] == [BlockMask] * 2 * (capability >= (8, 0))
    packed._compiles.cache_clear()
