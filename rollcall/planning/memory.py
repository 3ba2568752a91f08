"""The memory of one rank, in bytes, as terms that add up."""

from rollcall.planning.layout import Layout, Terms
from rollcall.planning.machine import Machine
from rollcall.planning.model import HALF, Model, Part
from rollcall.planning.step_time import cuts, held

KEPT = 1.4
"""Bytes that activations take for each byte counted: copies of eager kernels, and the gaps that the
caching allocator leaves. Fitted."""
CONTEXT = 0.5e9
"""Bytes of workspaces of CUDA's libraries."""
USABLE = 0.9
"""Fraction of the memory for all this; NCCL's buffers and the driver have the rest. Fitted."""


def of(model: Model, layout: Layout, machine: Machine) -> Terms:
    """Return the terms of the rank that needs most."""
    layers = cuts(model, layout, machine)
    # Inner stages hold fewer micro-batches the later they are: only these can be the largest.
    ends = {0, layout.stages - 1, layers.index(max(layers))}
    every = [stage(model, layout, number, layers[number]) for number in sorted(ends)]
    return max(every, key=Terms.total)


def stage(model: Model, layout: Layout, number: int, layers: int) -> Terms:
    """Return the terms of a rank of one stage."""
    count = held(model, layout, layers, number)
    is_half = layout.width == HALF
    shards, zero = layout.shards, layout.zero
    terms = Terms()
    terms["weights"] = count * layout.width / (shards if zero == 3 else 1)
    terms["gradients"] = count * layout.gradient / (shards if zero >= 2 else 1)
    terms["optimizer state"] = count * (12 if is_half else 8) / (shards if zero else 1)
    if zero == 3:  # the unit that computes and the next, gathered; and the gradient of one
        terms["gathered layers"] = 3 * layout.width * model.layer.weights / layout.tensor
    flying = min(layout.micro_batches, layout.stages - number)
    wide = layout.width / HALF
    one = _kept(model.layer, layout)
    if layout.recompute == "full":
        share = layout.context * (layout.tensor if layout.sequence else 1)
        saved = flying * layers * model.layer.boundary * layout.micro / share + one
    else:
        saved = flying * layers * one
    terms["activations"] = KEPT * saved * wide
    if number == 0:
        terms["activations"] += _kept(model.first, layout) * flying * wide
    if number == layout.stages - 1:
        terms["outputs and loss"] = _kept(model.last, layout)
    terms["workspaces"] = CONTEXT
    return terms


def _kept(part: Part, layout: Layout) -> float:
    whole = part.saved / (layout.tensor if layout.sequence else 1)
    return (whole + part.cut_saved / layout.tensor) * layout.micro / layout.context


def fits(terms: Terms, machine: Machine) -> bool:
    """Return whether a rank that needs this does not run out of memory."""
    return terms.total() <= machine.chip.memory * USABLE
