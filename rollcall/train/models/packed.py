"""Attention within the rows that are packed into a sequence, without a mask of length × length.

On GPUs torch's flex_attention, https://arxiv.org/abs/2412.05496, compiles a kernel that compares
the rows' numbers itself, and skips blocks that share no row. It copies no grouped heads.
"""

import shutil
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from rollcall.train.data.packing import same_row


def within_rows(position_ids: torch.Tensor, head_width: int) -> Any:
    """Return a causal mask for `attend`; positions (rows, length) begin at 0 in each row."""
    if position_ids.is_cuda and head_width >= 16 and _compiles(position_ids.device):
        return blocks(position_ids)
    return same_row(position_ids).tril()


@cache
def _compiles(device: torch.device) -> bool:
    """Return True if torch can compile kernels for this GPU here."""
    has_compiler = any(map(shutil.which, ("cc", "gcc", "clang"))) and find_spec("triton")
    return bool(has_compiler) and torch.cuda.get_device_capability(device) >= (8, 0)


def blocks(position_ids: torch.Tensor, size: int = 128) -> BlockMask:
    """Return which blocks of keys a block of queries needs, and which of them it needs whole."""
    number, length = (position_ids == 0).cumsum(1), position_ids.shape[1]
    first = number[:, ::size]
    last = torch.cat([number[:, size - 1 :: size], number[:, -1:]], 1)[:, : first.shape[1]]
    order = torch.arange(first.shape[1], device=number.device)
    needed = (last[:, None] >= first[..., None]) & (order <= order[:, None])
    whole = (first[:, None] == last[..., None]) & (order < order[:, None])
    whole &= (order[:, None] + 1) * size <= length

    def sees(row: Any, _: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (number[row, query] == number[row, key])

    parts, wholes = _listed(needed & ~whole), _listed(whole)
    return BlockMask.from_kv_blocks(*parts, *wholes, size, sees, (length, length))


def _listed(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many blocks each block of queries has, and these first, in order."""
    order = mask.int().argsort(dim=-1, descending=True, stable=True)
    return mask.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


@cache
def _kernel() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> torch.Tensor:
    """Return attention over (rows, heads, length, width), causal without a mask."""
    if isinstance(mask, BlockMask):
        return _kernel()(query, key, value, block_mask=mask, enable_gqa=True)  # type: ignore[no-any-return]
    if mask is not None:  # it rules out flash attention; other fast kernels want equal heads
        copies = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(copies, 1) for heads in (key, value))
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
