"""A model as the planner sees it: its parts in order, with what one sample costs in each.

Named shapes come from models.yaml; `rollcall.train.planning.trace` describes a model of the user's.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import did_you_mean

MODELS = Path(__file__).with_name("models.yaml")
HALF = 2
"""Bytes of a value in bf16 or fp16."""


class Product(NamedTuple):
    """A matrix product of the forward pass: (rows, inner) times (inner, columns), per sample."""

    rows: float
    inner: int
    columns: int
    cut: str = ""  # the side that tensor ranks divide: "columns", "inner" or nothing


class Attention(NamedTuple):
    """Causal attention of one sample over `length` tokens."""

    length: int
    heads: int
    width: int  # of a head
    kv_heads: int


@dataclasses.dataclass(frozen=True)
class Part:
    """A layer, or what comes before or after all layers; values have 16 bits.

    Attributes:
        weights: values, of which tensor ranks divide `cut_weights`.
        moved: bytes that operations other than products read and write per sample, forward and
            backward, of which tensor ranks divide `cut_moved`.
        saved: bytes per sample kept for the backward pass, which tensor ranks divide only with
            sequence parallelism. `inputs` of them go into divided products, and `stream` of them
            are sums, which autocast leaves in 32 bits. Tensor ranks divide `cut_saved` more.
        recast: bytes that autocast keeps more, of inputs that several products cast.
        outputs: values of the model's result per sample, which tensor ranks divide. A program's
            loss moves and keeps some bytes for each.
        whole: every tensor rank holds and computes all of it.
        boundary: bytes per sample that the part hands to the next.
        tensors: the number of weights as tensors, of which tensor ranks divide `cut_tensors`.
        units: what FSDP gathers as one.
    """

    weights: int
    cut_weights: int = 0
    products: tuple[Product, ...] = ()
    attention: Attention | None = None
    moved: float = 0
    cut_moved: float = 0
    saved: float = 0
    inputs: float = 0
    stream: float = 0
    recast: float = 0
    cut_saved: float = 0
    outputs: float = 0
    boundary: float = 0
    messages: int = 0  # all-reduces of `boundary` bytes among tensor ranks, forward and backward
    whole: bool = False
    tensors: float = 1
    cut_tensors: int = 0
    units: float = 1

    def ranks(self, tensor: int) -> int:
        """Return the number of tensor ranks that divide this part."""
        return 1 if self.whole else tensor

    def flops(self) -> float:
        """Multiplications and additions of the forward pass per sample."""
        products = sum(2 * rows * inner * columns for rows, inner, columns, _ in self.products)
        return products + (attention_flops(self.attention) if self.attention else 0)


def attention_flops(attention: Attention) -> float:
    """Two products of (length, width) by (width, length) per head, of which half is masked."""
    return 2.0 * attention.length**2 * attention.heads * attention.width


@dataclasses.dataclass(frozen=True)
class Model:
    """Equal layers, with the parts before and after them.

    Attributes:
        length: tokens per sample; 1 for models without sequences.
        divides: degrees of tensor ranks must divide this number; 1 if the model has no plan.
    """

    name: str
    first: Part
    layer: Part
    layers: int
    last: Part
    length: int = 1
    divides: int = 1
    tied: bool = False  # the last part uses the weights of the first
    exact_flops: float = 0.0  # of forward and backward pass per sample, if its code was counted

    @property
    def weights(self) -> int:
        """Values of all weights, each counted once."""
        return self.first.weights + self.layer.weights * self.layers + self.last.weights

    @property
    def parts(self) -> list[Part]:
        """All parts in order, each layer by itself."""
        return [self.first, *[self.layer] * self.layers, self.last]

    def with_whole_ends(self) -> "Model":
        """Return the model as rollcall's tensor ranks hold it; Megatron's divide the vocabulary."""
        first, last = (dataclasses.replace(end, whole=True) for end in (self.first, self.last))
        return dataclasses.replace(self, first=first, last=last)

    def flops(self) -> float:
        """Of forward and backward pass per sample, without recomputation."""
        forward = [self.first.flops(), self.layer.flops() * self.layers, self.last.flops()]
        return self.exact_flops or 3 * sum(forward)


def transformer(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    length: int,
    gated: bool,
    tied: bool,
) -> Model:
    """Return a decoder-only transformer.

    It keeps the activations that Korthikanti et al., https://arxiv.org/abs/2205.05198, count,
    without the scores, which a fused attention recomputes, and without dropout.
    """
    width = hidden // heads
    shared = kv_heads * width
    row = HALF * hidden * length  # bytes of one activation
    inner = HALF * ffn * length
    ups = 2 if gated else 1
    projections = hidden + 2 * shared
    products = (
        Product(length, hidden, projections, "columns"),
        Product(length, hidden, hidden, "inner"),
        Product(length, hidden, ups * ffn, "columns"),
        Product(length, ffn, hidden, "inner"),
    )
    cut = sum(product.inner * product.columns for product in products)
    attended = HALF * length * (2 * hidden + 2 * shared)  # queries, keys, values, outputs
    cut_tensors = 6 + gated  # queries, keys, values, outputs, and the perceptron's
    layer = Part(
        weights=cut + 2 * hidden,
        cut_weights=cut,
        products=products,
        attention=Attention(length, heads, width, kv_heads),
        # Norms: read and write, then read twice and write; residuals: 3 and 3; rotation or bias.
        moved=(2 * 5 + 2 * 6) * row,
        # Activation of the wide part: with a gate two products of values more.
        cut_moved=(13 if gated else 5) * inner + 2 * attended,
        saved=4 * row,  # inputs of both norms and of both groups of products
        inputs=2 * row,
        stream=2 * row,
        recast=2 * row,  # of the queries', keys' and values' products
        cut_saved=attended + (4 if gated else 2) * inner,
        boundary=row,
        messages=4,
        tensors=cut_tensors + 2,
        cut_tensors=cut_tensors,
    )
    first = Part(vocab * hidden, vocab * hidden, moved=4 * row, boundary=row, cut_tensors=1)
    last = Part(
        weights=hidden + (0 if tied else vocab * hidden),
        cut_weights=0 if tied else vocab * hidden,
        products=(Product(length, hidden, vocab, "columns"),),
        moved=5 * row,
        saved=2 * row,
        outputs=vocab * length,
        tensors=2 - tied,
        cut_tensors=1 - tied,
        units=2 - tied,  # the norm and the head
    )
    return Model(name, first, layer, layers, last, length, kv_heads, tied)


def named(name: str, length: int | None = None) -> Model:
    """Return a model of models.yaml as rollcall spreads it; `length` replaces its own."""
    known: Mapping[str, dict[str, Any]] = yaml.safe_load(MODELS.read_text())
    if name not in known:
        more = did_you_mean(name, known) or f"; choose from {', '.join(known)}"
        raise RefusedError(f"unknown shape '{name}'{more}")
    values = {key: value for key, value in known[name].items() if key != "source"}
    model = transformer(name, **{**values, "length": length or values["length"]})
    return model.with_whole_ends()


def shapes() -> list[str]:
    """Return the names of the shapes in models.yaml."""
    return list(yaml.safe_load(MODELS.read_text()))
