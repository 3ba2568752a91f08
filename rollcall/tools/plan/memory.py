"""The memory of one rank, in bytes, as terms that add up."""

from rollcall.config.checks import V_SHAPED
from rollcall.tools.plan.layout import Layout, Terms
from rollcall.tools.plan.machine import Machine, Software
from rollcall.tools.plan.model import HALF, Model, Part
from rollcall.tools.plan.step_time import FULL, cuts, held, keeps_products, local, scatters, state

CONTEXT = 0.5e9
"""Bytes of workspaces of CUDA's libraries."""
USABLE = 0.92
"""Fraction of the memory for all this; NCCL's buffers and the driver have the rest. Fitted."""


def of(model: Model, layout: Layout, machine: Machine) -> Terms:
    """Return the terms of the rank that needs most."""
    layers = cuts(model, layout, machine)
    # Inner stages hold fewer micro-batches the later they are: only these can be the largest.
    ends = {0, layout.last, layers.index(max(layers))}
    every = [stage(model, layout, machine, number, layers[number]) for number in sorted(ends)]
    return max(every, key=Terms.total)


def stage(model: Model, layout: Layout, machine: Machine, number: int, layers: int) -> Terms:
    """Return the terms of a rank of one stage."""
    weights = held(model, layout, layers, number)
    count, divided = sum(weights), state(weights, layout, machine.software)
    zero, software, is_pipeline = layout.zero, machine.software, layout.stages > 1
    terms = Terms()
    copies = software.copies and layout.width == HALF
    terms["weights"] = (divided if zero == 3 else count) * (HALF if copies else FULL)
    if zero == 2 and not copies:  # whole in the format of the products, beside the shards
        terms["weights"] = count * layout.width + divided * FULL
    casts = _casts(layout, software)
    if casts and layout.recompute != "full":  # of what follows the embedding
        terms["weights"] += HALF * (count - (number == 0) * sum(local(model.first, layout)))
    is_whole = zero < 2 or scatters(layout, software) < layout.micro_batches
    terms["gradients"] = (count if is_whole else divided) * software.gradient
    terms["optimizer state"] = divided * (12 if copies else 8)
    if zero == 3:  # all in a pipeline, or the unit that computes and the next; one's gradient
        unit = sum(local(model.layer, layout))
        terms["gathered layers"] = layout.width * (count if is_pipeline else 2 * unit) + FULL * unit
    wide = layout.width / HALF
    flying = min(layout.micro_batches, _ahead(layout, number))
    kept = _kept(model.layer, layout, machine, 1.0 if model.exact_flops else software.kept)
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
    if number == layout.last:
        outputs = model.last.outputs / layout.tensor / layout.context * layout.micro
        terms["outputs and loss"] = _kept(model.last, layout, machine)
        if outputs > software.outputs:  # the gradient of the head's weight is there meanwhile
            outputs, (_, inner, columns, *_) = software.outputs, model.last.products[0]
            terms["outputs and loss"] += FULL * inner * columns / layout.tensor
        terms["outputs and loss"] += software.loss_keeps * outputs
    terms["workspaces"] = CONTEXT
    return terms


def _ahead(layout: Layout, stage: int) -> float:
    """Micro-batches whose activations a rank keeps, if there are enough."""
    if layout.schedule in ("gpipe", "breadth-first"):
        return layout.micro_batches
    if layout.schedule == "sequential":
        return 1
    if layout.schedule in V_SHAPED:  # https://arxiv.org/abs/2401.10241, and 2412.19437
        return layout.stages + 0.5
    if layout.chunks > 1:  # the interleaved schedule of https://arxiv.org/abs/2104.04473
        ahead = 2 * (layout.stages - stage) - 1 + (layout.chunks - 1) * layout.stages
        return ahead / layout.chunks
    return layout.stages - stage


def _casts(layout: Layout, software: Software) -> bool:
    """Return True if autocast keeps 32 bits beside 16; FSDP casts what goes into a unit."""
    return layout.width == HALF and software.autocast and layout.zero < 2


def _kept(part: Part, layout: Layout, machine: Machine, copied: float = 1.0) -> float:
    """Bytes that a micro-batch keeps in a part, in 16 bits."""
    software, tensor = machine.software, layout.tensor
    pieces = tensor if layout.sequence else 1
    casts = _casts(layout, software)
    whole = (part.saved * copied + part.stream * casts) / pieces + part.recast * casts
    cut = part.cut_saved - software.regates * part.gated
    if keeps_products(layout, software) and part.attention:  # three of four rows are products
        whole, cut = part.saved * 3 / 4 / pieces, part.cut_saved - part.recomputed
    if not software.regathers:
        whole += part.inputs * (1 - 1 / pieces)
    uneven = layout.imbalance if layout.expert > 1 else 1
    spread = (part.expert_saved - software.regates * part.expert_gated) * uneven
    whole += spread / tensor if software.folds else spread
    return float((whole + cut / tensor) * layout.micro / layout.context)


def fits(terms: Terms, machine: Machine) -> bool:
    """Return True if a rank that needs this does not run out of memory."""
    return terms.total() <= machine.chip.memory * USABLE
