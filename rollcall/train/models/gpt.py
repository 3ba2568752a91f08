"""A decoder-only transformer with rotary positions and grouped-query attention.

The layout of GPT-2 (Radford et al., 2019), with rotary positions, https://arxiv.org/abs/2104.09864,
grouped queries, https://arxiv.org/abs/2305.13245, and RMSNorm, https://arxiv.org/abs/1910.07467.
Its code does not depend on ranks; it declares the plans by which `train/parallel` spreads it.
"""

from collections import OrderedDict
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from rollcall.config.schema import ConfigError, Model
from rollcall.train.data.packing import same_row
from rollcall.train.data.source import Source

ROTARY_BASE = 10_000.0  # of the wavelengths of the rotary positions


class Gpt(nn.Sequential):
    """An embedding, blocks, a norm and a linear layer."""

    tensor_plan: ClassVar = {
        "block*.attention.query": "columns",
        "block*.attention.key": "columns",
        "block*.attention.value": "columns",
        "block*.attention.out": "rows",
        "block*.up": "columns",
        "block*.down": "rows",
    }
    tensor_divides = ("hidden_size", "num_heads", "num_kv_heads")
    sequence_plan: ClassVar = {
        "embedding": "scatter",
        "block*.attention_norm": "of pieces",
        "block*.attention": "gather for columns",
        "block*.perceptron_norm": "of pieces",
        "block*.up": "columns of pieces",
        "norm": "of pieces",
        "head": "gather",
    }
    context_plan: ClassVar = {"block*.attention.rotation": 1}

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Map tokens (rows, length) to logits (rows, length, classes).

        Rows packed into one sequence have positions from 0 on, and do not attend to each other.
        """
        if position_ids is None:
            return super().forward(input_ids)  # type: ignore[no-untyped-call, no-any-return]
        x, mask = input_ids, same_row(position_ids).tril()
        for layer in self:
            x = layer(x, position_ids, mask) if isinstance(layer, Block) else layer(x)
        return x


def gpt(config: Model, source: Source) -> nn.Module:
    """Return a transformer for tokens: (rows, length) to (rows, length, classes) logits.

    Raises:
        ConfigError: the samples are not sequences, or the numbers of heads do not divide.
    """
    if len(source.shape) != 1:
        raise ConfigError(
            f"model.name=gpt expects one tensor of tokens, got samples of shape {source.shape}; "
            "choose data.name=text, or data.pack for rows of unequal length"
        )
    if config.hidden_size % (2 * config.num_heads):
        step = 2 * config.num_heads
        raise ConfigError(
            f"model.hidden_size={config.hidden_size}: expected a multiple of {step}, twice "
            f"model.num_heads; choose {-(-config.hidden_size // step) * step}"
        )
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"model.num_kv_heads={config.num_kv_heads}: expected a divisor of "
            f"model.num_heads={config.num_heads}"
        )
    embedding = nn.Embedding(source.classes, config.hidden_size)
    nn.init.normal_(embedding.weight, std=0.02)
    model = Gpt(OrderedDict(embedding=embedding))
    for number in range(config.num_layers):
        model.add_module(f"block{number}", Block(config, source.shape[0]))
    model.add_module("norm", nn.RMSNorm(config.hidden_size))
    model.add_module("head", nn.Linear(config.hidden_size, source.classes, bias=False))
    return model


class Block(nn.Module):
    """Attention and a perceptron, each with a norm before it and a residual connection."""

    def __init__(self, config: Model, length: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size)
        self.attention = Attention(config, length)
        self.perceptron_norm = nn.RMSNorm(config.hidden_size)
        self.up = nn.Linear(config.hidden_size, 4 * config.hidden_size, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.down = nn.Linear(4 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, *packed: torch.Tensor) -> torch.Tensor:
        """Map (rows, length, hidden) to the same shape; `packed` is passed on to `Attention`."""
        x = x + self.attention(self.attention_norm(x), *packed)
        hidden = self.dropout(functional.gelu(self.up(self.perceptron_norm(x))))
        out: torch.Tensor = x + self.down(hidden)
        return out


class Attention(nn.Module):
    """Causal attention; several query heads share one head of keys and values."""

    rotation: torch.Tensor

    def __init__(self, config: Model, length: int) -> None:
        super().__init__()
        self.head_width = config.hidden_size // config.num_heads
        self.register_buffer("rotation", _rotation(length, self.head_width), persistent=False)
        width, shared = config.hidden_size, config.num_kv_heads * self.head_width
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, shared, bias=False)
        self.value = nn.Linear(width, shared, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor | None = None,  # (rows, length); by default they count from 0
        mask: torch.Tensor | None = None,  # (rows, 1, length, length); by default a causal one
    ) -> torch.Tensor:
        """Map (rows, length, hidden) to the same shape."""
        rotation = self.rotation[:, : x.shape[1]]
        if positions is not None:
            rotation = self.rotation[:, positions].unsqueeze(2)  # the same for all heads
        query = _rotate(self._heads(self.query(x)), rotation)
        key = _rotate(self._heads(self.key(x)), rotation)
        value = self._heads(self.value(x))
        if mask is not None:  # it rules out flash attention; other fast kernels want equal heads
            copies = query.shape[1] // key.shape[1]
            key, value = (heads.repeat_interleave(copies, 1) for heads in (key, value))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        # -1: a rank of a tensor group has only some of the heads.
        return x.view(*x.shape[:-1], -1, self.head_width).transpose(1, 2)


def _rotation(length: int, head_width: int) -> torch.Tensor:
    """Cosines and sines of each position: (2, length, head_width / 2)."""
    rates = ROTARY_BASE ** (-torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(length), rates)
    return torch.stack([angles.cos(), angles.sin()])


def _rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of (rows, heads, length, head_width) by the angle of its position."""
    cos, sin = rotation
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).type_as(x)
