"""The bytes that rollcall's own strategies hand to collectives in a step."""

import math

from rollcall.planning.layout import Layout, Terms
from rollcall.planning.model import Model
from rollcall.planning.step_time import FULL, held

MESSAGES = 6
"""All-reduces of a layer of gpt: two forward, and one for each input of cut layers backward."""


def of_step(model: Model, layout: Layout) -> Terms:
    """Return the bytes by kind of collective on each rank, forward and backward; one stage.

    FSDP gathers weights in the format of the products. Gradients are added up in fp32.
    """
    terms, values = Terms(), held(model, layout, model.layers, 0)
    group = layout.data * layout.context
    if layout.zero < 2 and group > 1:
        terms["all-reduce"] = FULL * values
    if layout.zero >= 2:
        times = 2 * layout.micro_batches if layout.zero == 3 else 1
        if layout.shards > 1:
            terms["all-gather"] = times * layout.width * values
            terms["reduce-scatter"] = FULL * values
        if group > layout.shards:
            terms["all-reduce"] = FULL * values / layout.shards
    tokens = model.length * layout.micro * layout.micro_batches
    if layout.tensor > 1:
        rows = layout.width / 2 * model.layer.boundary * tokens / model.length
        terms.add("all-reduce", MESSAGES * model.layers * rows)
    if layout.context > 1 and (attention := model.layer.attention):
        shared = math.lcm(attention.kv_heads // layout.tensor, layout.context)
        row = 2 * (attention.heads // layout.tensor + shared) * attention.width
        terms["all-to-all"] = 2 * model.layers * layout.width * row * tokens / layout.context
    return terms
