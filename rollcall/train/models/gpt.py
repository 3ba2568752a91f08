"""A decoder-only transformer with rotary positions and grouped-query attention.

The layout of GPT-2 (Radford et al., 2019), with rotary positions, https://arxiv.org/abs/2104.09864,
grouped queries, https://arxiv.org/abs/2305.13245, and RMSNorm, https://arxiv.org/abs/1910.07467.
Its code does not depend on ranks; it declares the plans by which `train/parallel` spreads it.
"""

import math
from collections import OrderedDict
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from rollcall.config.schema import ConfigError, Model
from rollcall.train.data.source import Source
from rollcall.train.models.packed import attend, within_rows
from rollcall.train.parallel.experts import Experts

SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class Cache:
    """The keys and values of the tokens so far, by layer; `generate` passes it to each forward."""

    def __init__(self) -> None:
        self.length = 0  # of the tokens so far
        self._layers: dict[nn.Module, tuple[torch.Tensor, ...]] = {}

    def extend(self, layer: nn.Module, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Append keys and values (rows, heads, length, head_width); return all so far."""
        kept = self._layers.get(layer)
        both = tuple(torch.cat(pair, 2) for pair in zip(kept, new, strict=True)) if kept else new
        self._layers[layer] = both
        return both


class Gpt(nn.Sequential):
    """An embedding, blocks, a norm and a linear layer."""

    tensor_plan: ClassVar = {
        "embedding": "vocabulary",
        "block*.attention.query": "columns",
        "block*.attention.key": "columns",
        "block*.attention.value": "columns",
        "block*.attention.out": "rows",
        "block*.up": "columns",
        "block*.down": "rows",
        "head": "vocabulary",
    }
    tensor_divides = ("hidden_size", "num_heads", "num_kv_heads")
    sequence_plan: ClassVar = {
        "embedding": "scatter",
        "block*.attention_norm": "of pieces",
        "block*.attention": "gather for columns",
        "block*.perceptron_norm": "of pieces",
        "block*.up": "columns of pieces",
        "block*.experts": "whole",
        "norm": "of pieces",
        "head": "gather",
    }
    context_plan: ClassVar = {"block*.attention.rotation": 1}
    only_dropout_draws = True  # random numbers in a pass
    output_layer = "head"

    new_cache: ClassVar = Cache  # `generate` calls it

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """Map tokens (rows, length) to logits (rows, length, classes).

        Rows packed into one sequence have positions from 0 on, and do not attend to each other.
        With a cache, the tokens follow the cached ones.
        """
        if cache is not None:
            old, new = cache.length, input_ids.shape[1]
            cache.length += new
            positions = torch.arange(old + new, device=input_ids.device)
            position_ids = positions[old:].expand_as(input_ids)
            mask = (positions <= positions[old:, None])[None, None]
        elif position_ids is not None:
            block: Any = self.block0
            mask = within_rows(position_ids, block.attention.head_width)
        else:
            return super().forward(input_ids)  # type: ignore[no-untyped-call, no-any-return]
        x = input_ids
        for layer in self:
            x = layer(x, position_ids, mask, cache) if isinstance(layer, Block) else layer(x)
        return x


def gpt(config: Model, source: Source) -> nn.Module:
    """Return a transformer for tokens: (rows, length) to (rows, length, classes) logits."""
    return transformer(Gpt, Block, config, source)


def transformer(kind: type[Gpt], block: "type[Block]", config: Model, source: Source) -> Gpt:
    """Return a transformer of this class with blocks of that class."""
    if len(source.shape) != 1:
        raise ConfigError(
            f"model.name={config.name} expects one tensor of tokens, got samples of shape "
            f"{source.shape}; choose data.name=text, or data.pack for rows of unequal length"
        )
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"model.num_kv_heads={config.num_kv_heads}: expected a divisor of "
            f"model.num_heads={config.num_heads}"
        )
    if config.rope_scaling and {*config.rope_scaling} != {*SCALING}:
        raise ConfigError(f"model.rope_scaling: expected the keys {', '.join(SCALING)}")
    embedding = nn.Embedding(source.classes, config.hidden_size)
    nn.init.normal_(embedding.weight, std=0.02)
    model = kind(OrderedDict(embedding=embedding))
    if config.experts and config.dense_layers >= config.num_layers:
        raise ConfigError(
            f"model.dense_layers={config.dense_layers}: expected fewer than "
            f"model.num_layers={config.num_layers}, so that a block has experts"
        )
    if config.experts and not config.dense_layers:
        dense = ("block*.up", "block*.down")
        plan = {name: cut for name, cut in kind.tensor_plan.items() if name not in dense}
        vars(model)["tensor_plan"] = plan
    for number in range(config.num_layers):
        is_dense = number < config.dense_layers
        of_block = config.model_copy(update={"experts": 0}) if is_dense else config
        model.add_module(f"block{number}", block(of_block, source.shape[0]))
    model.add_module("norm", nn.RMSNorm(config.hidden_size, config.norm_eps))
    head = nn.Linear(config.hidden_size, source.classes, bias=False)
    if config.tied:
        head.weight = embedding.weight
    model.add_module("head", head)
    return model


def experts(config: Model, width: int) -> Experts:
    """Return the layer of experts of a block; raise ConfigError if there are fewer than top_k."""
    if config.top_k > config.experts:
        raise ConfigError(
            f"model.top_k={config.top_k}: expected at most model.experts={config.experts}"
        )
    return Experts(
        config.hidden_size,
        config.expert_size or width,
        config.experts,
        config.top_k,
        shared=config.shared_experts,
        scores=config.router_scores,
        routed_scale=config.routed_scale,
        balance_rate=config.balance_rate,
        balance_loss=config.balance_loss,
        z_loss=config.router_z_loss,
        capacity_factor=config.expert_capacity,
    )


class Block(nn.Module):
    """Attention and a perceptron or experts, each with a norm before it and a residual."""

    def __init__(self, config: Model, length: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, length)
        self.perceptron_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.add_perceptron(config.hidden_size, config.ffn_size or 4 * config.hidden_size, config)

    def add_perceptron(self, hidden: int, width: int, config: Model) -> None:
        """Add the layers of `feed`."""
        self.dropout = nn.Dropout(config.dropout)
        self.experts = experts(config, width) if config.experts else None
        if not self.experts:
            self.up = nn.Linear(hidden, width, bias=False)
            self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        """Map (rows, length, hidden) to the same shape; `more` is passed on to `Attention`."""
        x = x + self.attention(self.attention_norm(x), *more)
        return x + self.feed(self.perceptron_norm(x))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        """Map each token by itself."""
        if self.experts:
            mixed: torch.Tensor = self.dropout(self.experts(x))
            return mixed
        out: torch.Tensor = self.down(self.dropout(functional.gelu(self.up(x))))
        return out


class Attention(nn.Module):
    """Causal attention; several query heads share one head of keys and values."""

    rotation: torch.Tensor

    def __init__(self, config: Model, length: int) -> None:
        super().__init__()
        self.head_width = config.hidden_size // config.num_heads
        rotation = _rotation(length, self.head_width, config)
        self.register_buffer("rotation", rotation, persistent=False)
        width, shared = config.hidden_size, config.num_kv_heads * self.head_width
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, shared, bias=False)
        self.value = nn.Linear(width, shared, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor | None = None,  # (rows, length); by default they count from 0
        mask: Any = None,  # as `attend` takes it; by default a causal one
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """Map (rows, length, hidden) to the same shape."""
        rotation = self.rotation[:, : x.shape[1]]
        if positions is not None:
            rotation = self.rotation[:, positions].unsqueeze(2)  # the same for all heads
        query = _rotate(self._heads(self.query(x)), rotation)
        key = _rotate(self._heads(self.key(x)), rotation)
        value = self._heads(self.value(x))
        if cache is not None:
            key, value = cache.extend(self, key, value)
        mixed = attend(query, key, value, mask)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        # -1: a rank of a tensor group has only some of the heads.
        return x.view(*x.shape[:-1], -1, self.head_width).transpose(1, 2)


def _rotation(length: int, head_width: int, config: Model) -> torch.Tensor:
    """Cosines and sines of each position: (2, length, head_width / 2)."""
    rates = 1 / config.rope_theta ** (torch.arange(0, head_width, 2) / head_width)
    if scaling := config.rope_scaling:  # of Llama 3.1: long waves become longer
        turns = scaling["original_max_position_embeddings"] * rates / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        rates = (1 - kept) * rates / scaling["factor"] + kept * rates
    angles = torch.outer(torch.arange(length), rates)
    return torch.stack([angles.cos(), angles.sin()])


def _rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of (rows, heads, length, head_width) by the angle of its position."""
    cos, sin = rotation
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).type_as(x)
