"""The memory of one rank, in bytes, as terms that add up."""

from rollcall.tools.plan.layout import Layout, Terms
from rollcall.tools.plan.machine import Machine, Software
from rollcall.tools.plan.model import HALF, Model, Part
from rollcall.tools.plan.step_time import FULL, cuts, held

CONTEXT = 0.5e9
"""Bytes of workspaces of CUDA's libraries."""
USABLE = 0.92
"""Fraction of the memory for all this; NCCL's buffers and the driver have the rest. Fitted."""


def of(model: Model, layout: Layout, machine: Machine) -> Terms:
    """Return the terms of the rank that needs most."""
    layers = cuts(model, layout, machine)
    # Inner stages hold fewer micro-batches the later they are: only these can be the largest.
    ends = {0, layout.stages - 1, layers.index(max(layers))}
    every = [stage(model, layout, machine, number, layers[number]) for number in sorted(ends)]
    return max(every, key=Terms.total)


def stage(model: Model, layout: Layout, machine: Machine, number: int, layers: int) -> Terms:
    """Return the terms of a rank of one stage."""
    count = held(model, layout, layers, number)
    is_half = layout.width == HALF
    shards, zero, software = layout.shards, layout.zero, machine.software
    terms = Terms()
    copies = software.copies and is_half
    terms["weights"] = count * (HALF if copies else FULL) / (shards if zero == 3 else 1)
    if zero == 2 and not copies:  # whole in the format of the products, beside the shards
        terms["weights"] = count * (layout.width + FULL / shards)
    casts = _casts(layout, software)
    if casts and layout.recompute != "full":  # of what follows the embedding
        rest = count - (number == 0) * model.first.weights / model.first.ranks(layout.tensor)
        terms["weights"] += HALF * rest
    whole = software.whole and layout.micro_batches > 1
    terms["gradients"] = count * software.gradient / (shards if zero >= 2 and not whole else 1)
    terms["optimizer state"] = count * (12 if copies else 8) / (shards if zero else 1)
    if zero == 3:  # the unit that computes and the next, gathered; and the gradient of one
        terms["gathered layers"] = (2 * layout.width + FULL) * model.layer.weights / layout.tensor
    flying: float = min(layout.micro_batches, layout.stages - number)
    wide = layout.width / HALF
    if layout.chunks > 1:  # the interleaved schedule of https://arxiv.org/abs/2104.04473
        ahead = 2 * (layout.stages - number) - 1 + (layout.chunks - 1) * layout.stages
        flying = min(layout.micro_batches, ahead / layout.chunks)
    copied = 1.0 if model.exact_flops else software.kept
    kept = _kept(model.layer, layout, machine, copied)
    attention = model.layer.attention
    if attention and not software.fused and layout.recompute != "selective":
        # Softmax, what dropout leaves of it, and its mask.
        scores = attention.heads * attention.length**2 * layout.micro
        kept += 5 * scores / layout.tensor / layout.context
    if layout.recompute == "full":
        share = layout.context * (layout.tensor if layout.sequence else 1)
        stream = FULL / HALF if casts else 1
        saved = stream * flying * layers * model.layer.boundary * layout.micro / share + kept
    else:
        saved = flying * layers * kept
    terms["activations"] = saved * wide
    if number == 0:
        terms["activations"] += _kept(model.first, layout, machine) * flying * wide
    if number == layout.stages - 1:
        outputs = model.last.outputs / model.last.ranks(layout.tensor) / layout.context
        terms["outputs and loss"] = _kept(model.last, layout, machine)
        terms["outputs and loss"] += software.loss_keeps * outputs * layout.micro
    terms["workspaces"] = CONTEXT
    return terms


def _casts(layout: Layout, software: Software) -> bool:
    """Return True if autocast keeps 32 bits beside 16; FSDP casts what goes into a unit."""
    return layout.width == HALF and software.autocast and layout.zero < 2


def _kept(part: Part, layout: Layout, machine: Machine, copied: float = 1.0) -> float:
    """Bytes that a micro-batch keeps in a part, in 16 bits."""
    software, tensor = machine.software, part.ranks(layout.tensor)
    pieces = tensor if layout.sequence else 1
    casts = _casts(layout, software)
    whole = (part.saved * copied + part.stream * casts) / pieces + part.recast * casts
    if not software.regathers:
        whole += part.inputs * (1 - 1 / pieces)
    return (whole + part.cut_saved / tensor) * layout.micro / layout.context


def fits(terms: Terms, machine: Machine) -> bool:
    """Return True if a rank that needs this does not run out of memory."""
    return terms.total() <= machine.chip.memory * USABLE
