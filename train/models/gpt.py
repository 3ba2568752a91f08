"""A decoder-only transformer: rotary positions, grouped-query attention, and nothing exotic.

GPT-2 (Radford et al., 2019) in its layout, with rotary positions, https://arxiv.org/abs/2104.09864,
grouped queries, https://arxiv.org/abs/2305.13245, and RMSNorm, https://arxiv.org/abs/1910.07467.
It knows nothing of ranks: `train/parallel` cuts it from outside.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional

from train.data.source import Source
from train.schema import ConfigError, Model

BASE = 10_000.0  # of the wave lengths of the rotary positions


def gpt(config: Model, source: Source) -> nn.Module:
    """A transformer for sequences of tokens: (rows, context) to (rows, context, classes) logits.

    Raises:
        ConfigError: the samples are no sequences, or the width, heads and kv_heads do not divide.
    """
    if len(source.shape) != 1:
        raise ConfigError(
            f"model.name=gpt needs sequences of tokens, but the samples of this data have shape "
            f"{source.shape}: choose data.name=text"
        )
    if config.hidden % (2 * config.heads):
        step = 2 * config.heads
        raise ConfigError(
            f"model.hidden={config.hidden} does not divide into model.heads={config.heads} of an "
            f"even width: choose model.hidden={-(-config.hidden // step) * step}"
        )
    if config.heads % config.kv_heads:
        raise ConfigError(
            f"model.heads={config.heads} do not share model.kv_heads={config.kv_heads} evenly: "
            "choose a divisor"
        )
    embedding = nn.Embedding(source.classes, config.hidden)
    nn.init.normal_(embedding.weight, std=0.02)
    layers = {f"block{number}": Block(config, source.shape[0]) for number in range(config.layers)}
    return nn.Sequential(
        OrderedDict(
            embedding=embedding,
            **layers,
            norm=nn.RMSNorm(config.hidden),
            head=nn.Linear(config.hidden, source.classes, bias=False),
        )
    )


class Block(nn.Module):
    """Attention, then a perceptron, each on the normalised sum of what came before."""

    def __init__(self, config: Model, context: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.attention = Attention(config, context)
        self.perceptron_norm = nn.RMSNorm(config.hidden)
        self.up = nn.Linear(config.hidden, 4 * config.hidden, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.down = nn.Linear(4 * config.hidden, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (rows, length, hidden) to the same."""
        x = x + self.attention(self.attention_norm(x))
        hidden = self.dropout(functional.gelu(self.up(self.perceptron_norm(x))))
        out: torch.Tensor = x + self.down(hidden)
        return out


class Attention(nn.Module):
    """Causal attention; several heads of queries share one of keys and values."""

    rotation: torch.Tensor

    def __init__(self, config: Model, context: int) -> None:
        super().__init__()
        self.head_width = config.hidden // config.heads
        rotation = _rotation(context, self.head_width)
        self.register_buffer("rotation", rotation, persistent=False)
        shared = config.kv_heads * self.head_width
        self.query = nn.Linear(config.hidden, config.hidden, bias=False)
        self.key = nn.Linear(config.hidden, shared, bias=False)
        self.value = nn.Linear(config.hidden, shared, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (rows, length, hidden) to the same."""
        rotation = self.rotation[:, : x.shape[1]]
        query = _rotate(self._heads(self.query(x)), rotation)
        key = _rotate(self._heads(self.key(x)), rotation)
        value = self._heads(self.value(x))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        # As many heads as there are: a rank of a tensor group has only some of them.
        return x.view(*x.shape[:-1], -1, self.head_width).transpose(1, 2)


def _rotation(context: int, head_width: int) -> torch.Tensor:
    """Cosines and sines of each position: (2, context, head_width / 2)."""
    rates = BASE ** (-torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(context), rates)
    return torch.stack([angles.cos(), angles.sin()])


def _rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turn each pair of (rows, heads, length, head_width) by the angle of its position."""
    cos, sin = rotation
    first, second = x.float().chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
    return turned.type_as(x)
