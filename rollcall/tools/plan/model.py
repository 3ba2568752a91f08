"""A model as the planner sees it: its parts in order, with what one sample costs in each.

shapes.py reads known shapes and files of Hugging Face; own_model.py describes a user's model.
"""

import dataclasses
from typing import NamedTuple

NEEDED = ["layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "length", "gated", "tied"]
OPTIONAL = ["q_rank", "kv_rank", "experts", "shared_ffn"]
HALF = 2
"""Bytes of a value in bf16 or fp16."""


class Product(NamedTuple):
    """A matrix product of the forward pass: (rows, inner) times (inner, columns), per sample."""

    rows: float
    inner: int
    columns: int
    # What tensor ranks divide: "columns", "inner", or nothing; of a "shared" expert, the rows.
    cut: str = ""
    experts: int = 0  # matrices among which the rows are divided
    often: float = 1.0  # the fraction of the layers that have it


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
        recomputed: bytes of `cut_saved` that torch's selective recomputation does not keep.
        gated, expert_gated: bytes of one of the four values that a gate keeps in `cut_saved` and
            `expert_saved`: both factors' products, one's activation and their product.
        recast: bytes that autocast keeps more, of inputs that several products cast.
        expert_weights, expert_moved, expert_saved: the same of experts, which expert ranks divide.
        routed: bytes per sample that an exchange of tokens sends to experts.
        outputs: values of the model's result per sample, which tensor ranks divide. A program's
            loss moves and keeps some bytes for each.
        boundary: bytes per sample that the part hands to the next.
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
    recomputed: float = 0
    gated: float = 0
    expert_gated: float = 0
    expert_weights: int = 0
    expert_moved: float = 0
    expert_saved: float = 0
    routed: float = 0
    outputs: float = 0
    boundary: float = 0
    # All-reduces among tensor ranks, forward and backward, of `boundary` bytes, which is also what
    # the head gets.
    messages: float = 0

    def flops(self) -> float:
        """Multiplications and additions of the forward pass per sample."""
        products = sum(2 * p.rows * p.inner * p.columns * p.often for p in self.products)
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
        experts: of a layer, which expert ranks must divide.
    """

    name: str
    first: Part
    layer: Part
    layers: int
    last: Part
    length: int = 1
    divides: int = 1
    tied: bool = False  # the last part uses the weights of the first
    experts: int = 1
    exact_flops: float = 0.0  # of forward and backward pass per sample, if its code was counted

    @property
    def weights(self) -> int:
        """Values of all weights, each counted once."""
        return self.first.weights + self.layer.weights * self.layers + self.last.weights

    def flops(self) -> float:
        """Of forward and backward pass per sample, without recomputation."""
        forward = [self.first.flops(), self.layer.flops() * self.layers, self.last.flops()]
        return self.exact_flops or 3 * sum(forward)


def transformer(name: str, **shape: int) -> Model:
    """Return a decoder-only transformer.

    It keeps the activations that Korthikanti et al., https://arxiv.org/abs/2205.05198, count,
    without the scores, which a fused attention recomputes, and without dropout. With `kv_rank`,
    attention is the latent one of DeepSeek-V2, https://arxiv.org/abs/2405.04434. Layers with and
    without experts are averaged.

    Args:
        name: what to call it.
        shape: the numbers of models.yaml; all of attention and experts may be left out.
    """
    layers, hidden, heads, kv_heads, ffn, vocab, length, gated, tied = (shape[k] for k in NEEDED)
    q_rank, kv_rank, experts, shared_ffn = (shape.get(k, 0) for k in OPTIONAL)
    width = shape.get("head_dim") or hidden // heads
    out = shape.get("value_dim") or width  # of a head
    row = HALF * hidden * length  # bytes of one activation
    ups = 2 if gated else 1
    mixed = 1 - shape.get("dense_layers", 0) / layers if experts else 0.0  # the share with experts
    dense = 1 - mixed
    inner = HALF * ffn * length * dense
    if kv_rank:
        rotated = shape["rope_dim"]
        pairs = [(q_rank or hidden, heads * width), (kv_rank, heads * (width - rotated + out))]
        whole = [Product(length, hidden, kv_rank + rotated)]
        whole += [Product(length, hidden, q_rank)] if q_rank else []
    else:
        pairs, whole = [(hidden, heads * width + kv_heads * (width + out))], []
    cut_products = [Product(length, *pair, "columns") for pair in pairs]
    cut_products.append(Product(length, heads * out, hidden, "inner"))
    if dense:
        cut_products.append(Product(length, hidden, ups * ffn, "columns", often=dense))
        cut_products.append(Product(length, ffn, hidden, "inner", often=dense))
    of_experts, used, routed = [], 0.0, 0.0
    if mixed:
        whole.append(Product(length, hidden, experts, often=mixed))  # the router
        top_k, expert_ffn = shape["top_k"], shape["expert_ffn"]
        used = HALF * length * mixed * (top_k * expert_ffn + shared_ffn)
        routed = mixed * top_k * row
        for rows, size, number in ((length, shared_ffn, 0), (length * top_k, expert_ffn, experts)):
            if size:
                side = "" if number else "shared"
                up = Product(rows, hidden, ups * size, side, number, mixed)
                of_experts += [up, Product(rows, size, hidden, side, number, mixed)]
    cut = round(sum(p.inner * p.columns * p.often for p in cut_products))
    rest = sum(p.inner * p.columns * p.often for p in [*whole, *of_experts] if not p.experts)
    spread = round(sum(p.inner * p.columns * p.often * p.experts for p in of_experts))
    # Queries, keys, values, outputs.
    attended = HALF * length * (heads + kv_heads) * (width + out)
    layer = Part(
        weights=cut + spread + round(rest) + 2 * hidden,
        cut_weights=cut,
        products=(*cut_products, *whole, *of_experts),
        attention=Attention(length, heads, (width + out) // 2, kv_heads),
        # Norms: read and write, then read twice and write; residuals: 3 and 3; rotation or bias.
        moved=(2 * 5 + 2 * 6) * row,
        # Activation of the wide part: with a gate two products of values more.
        cut_moved=(13 if gated else 5) * inner + 2 * attended,
        saved=4 * row,  # inputs of both norms and of both groups of products
        inputs=2 * row,
        stream=2 * row,
        recast=2 * row,  # of the queries', keys' and values' products
        cut_saved=attended + (4 if gated else 2) * inner,
        recomputed=(2 if gated else 1) * inner,
        gated=inner if gated else 0,
        expert_gated=used if gated else 0,
        expert_weights=spread,
        # Rows are copied and sorted twice on the way there, twice back, and so are gradients.
        expert_moved=(13 if gated else 5) * used + 16 * routed,
        expert_saved=(4 if gated else 2) * used + 2 * routed,
        routed=routed,
        boundary=row,
        messages=4 - 2 * mixed,
    )
    first = Part(vocab * hidden, vocab * hidden, moved=4 * row, boundary=row, messages=1)
    last = Part(
        weights=hidden + (0 if tied else vocab * hidden),
        cut_weights=0 if tied else vocab * hidden,
        products=(Product(length, hidden, vocab, "columns"),),
        moved=5 * row,
        saved=2 * row,
        outputs=vocab * length,
        boundary=row,
        messages=1,
    )
    divides = heads if kv_rank else kv_heads
    return Model(name, first, layer, layers, last, length, divides, bool(tied), experts or 1)
