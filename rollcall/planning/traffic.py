"""The bytes that rollcall's own strategies hand to collectives in a step."""

from rollcall.planning.layout import Layout, Terms
from rollcall.planning.model import Model

FULL = 4
"""Bytes of a value: weights and gradients travel in fp32, unless a run chooses otherwise."""
MESSAGES = 6
"""All-reduces of a layer of gpt: two forward, and one for each input of cut layers backward."""


def of_step(model: Model, layout: Layout) -> Terms:
    """Return the bytes by kind of collective on each rank, forward and backward."""
    terms, whole = Terms(), FULL * model.weights
    group = layout.data * layout.context
    if layout.zero < 2 and group > 1:
        terms["all-reduce"] = whole
    if layout.zero >= 2:
        times = 2 * layout.micro_batches if layout.zero == 3 else 1
        if layout.shards > 1:
            terms["all-gather"], terms["reduce-scatter"] = times * whole, whole
        if group > layout.shards:
            terms["all-reduce"] = whole / layout.shards
    if layout.tensor > 1:
        rows = FULL // 2 * model.layer.boundary * layout.micro * layout.micro_batches
        terms["all-reduce"] = MESSAGES * model.layers * rows
    return terms
