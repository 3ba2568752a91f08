"""The time of a training step, in seconds, as terms that add up.

A kernel takes the time of a roofline, https://doi.org/10.1145/1498765.1498785, with its two times
added: products at a fraction of the chip's peak, and their operands through the memory. That makes
narrow products slow without a curve. Collectives are rings: a bandwidth, and a latency a step.
"""

import math

from rollcall.planning.layout import Layout, Terms
from rollcall.planning.machine import Machine
from rollcall.planning.model import HALF, Model, Part, attention_flops

MOVING = 0.8
"""Fraction of the memory's bandwidth that streaming kernels reach."""
PASSES = 1.5
"""Bytes that eager kernels move for each byte that the operations need. Fitted."""
SCORES = 70
"""Bytes moved for each attention score, forward and backward, without fused attention. Fitted."""
LINKS_INSIDE = 0.75
"""Fraction of the links inside a node that collectives reach. Fitted."""
LINKS_BETWEEN = 0.5
"""Fraction of the links between nodes that collectives reach. Fitted."""
SLOWED = 0.5
"""Time by which a collective slows the computation beside it, relative to it. Fitted."""
HOP_INSIDE = 1e-5
"""Seconds of one step of a ring inside a node, with the kernel's start."""
BACKWARD = 2.5
"""Products of fused attention's backward pass for each of its forward pass."""
UPDATE = 30
"""Bytes that Adam moves for each weight: gradient, master copy and two moments, and the weight."""
BUCKET = 25e6
"""Bytes of gradients that one all-reduce carries: DDP's default."""
MIXED = 4
"""Norm that joins the host's and the GPU's time of a layer, whose kernels differ in size."""


def ring(size: float, ranks: int, local: int, machine: Machine) -> float:
    """Seconds of an all-gather or reduce-scatter of `size` bytes; an all-reduce is both.

    `local` of the ranks share a node; each brings one link to other nodes.
    """
    if ranks == 1:
        return 0.0
    rate, hop = machine.chip.inside * LINKS_INSIDE, HOP_INSIDE
    if local < ranks:
        rate = min(rate, local * machine.chip.between * LINKS_BETWEEN)
        hop = machine.software.hop
    return (ranks - 1) * (size / ranks / rate + hop)


def work(part: Part, layout: Layout, machine: Machine, forwards: int = 1) -> Terms:
    """Seconds of a GPU for one micro-batch of a part, forward and backward.

    `forwards` is 2 if the backward pass repeats the forward pass.
    """
    chip, tensor, context = machine.chip, layout.tensor, layout.context
    moving, wide = chip.bandwidth * MOVING, layout.width / HALF
    passes = forwards + 2  # products of a backward pass: one for the input, one for the weight
    is_fp8 = layout.precision == "fp8" and part.cut_weights > 0 and part.messages > 0
    peak = chip.flops[layout.precision if is_fp8 or layout.precision != "fp8" else "bf16"]
    flops = moved = 0.0
    for rows, inner, columns, cut in part.products:
        m = layout.micro * rows / context
        k = inner / (tensor if cut == "inner" else 1)
        n = columns / (tensor if cut == "columns" else 1)
        flops += 2 * m * k * n
        moved += layout.width * (m * k + k * n + m * n)
        if is_fp8:  # operands are read in 16 bits and written in 8, twice
            moved += 2 * HALF * (m * k + k * n)
    terms = Terms()
    terms["matrix products"] = passes * (flops / (peak * chip.product) + moved / moving)
    if attention := part.attention:
        share = layout.micro / tensor / context
        flops = attention_flops(attention) * share
        half = chip.flops["bf16" if layout.precision == "fp8" else layout.precision]
        if machine.software.fused:
            rate = half * chip.attention * machine.software.attention
            terms["attention"] = flops / rate * (forwards + BACKWARD)
        else:
            scores = attention.heads * attention.length**2 * share
            flops *= 2 if attention.causal else 1  # nothing is skipped
            terms["attention"] = passes * flops / (half * chip.product)
            terms["attention"] += passes / 3 * SCORES * wide * scores / moving
    whole = part.moved / (tensor if layout.sequence else 1)
    moved = (whole + part.cut_moved / tensor) * wide * layout.micro / context
    terms["other operations"] = passes / 3 * PASSES * moved / moving
    if part.messages and tensor > 1:
        size = part.boundary * wide * layout.micro / context
        one = ring(size, tensor, min(tensor, machine.node), machine)
        again = 1.5 if forwards > 1 else 1
        terms["tensor collectives"] = 2 * again * part.messages * one
    if part.attention and context > 1:  # queries, keys, values and outputs change their cut
        _, heads, width, kv_heads = part.attention[:4]
        values = part.attention.length * width * 2 * (heads + kv_heads)
        size = layout.width * values * layout.micro / tensor / context
        local = max(1, min(context, machine.node // tensor))
        one = ring(size, context, local, machine)
        terms["context collectives"] = (forwards + 1) * one
    return terms


def cuts(model: Model, layout: Layout, machine: Machine) -> list[int]:
    """Return the number of layers of each stage."""
    stages, layers = layout.stages, model.layers
    if not machine.software.balanced:
        return [layers // stages + (stage < layers % stages) for stage in range(stages)]
    head = sum(product.inner * product.columns for product in model.last.products)
    share = (layers + head / model.layer.cut_weights) / stages
    ends = [min(layers, round(share * (stage + 1))) for stage in range(stages - 1)]
    return [end - start for start, end in zip([0, *ends], [*ends, layers], strict=True)]


def held(model: Model, layout: Layout, layers: int, stage: int) -> float:
    """Return the number of weights of a stage on one rank, before ZeRO divides them."""
    parts = [(model.layer, layers)]
    is_last = stage == layout.stages - 1
    if stage == 0 or (is_last and model.tied):
        parts.append((model.first, 1))
    if is_last:
        parts.append((model.last, 1))
    cut = 1 - 1 / layout.tensor
    return sum(count * (part.weights - part.cut_weights * cut) for part, count in parts)


def of(model: Model, layout: Layout, machine: Machine) -> Terms:
    """Return the terms of a step on the slowest stage's rank; their sum is the step's time."""
    software, moving = machine.software, machine.chip.bandwidth * MOVING
    stages, tensor = layout.stages, layout.tensor
    forwards = 2 if layout.recompute == "full" else 1
    layer = work(model.layer, layout, machine, forwards)
    first, last = work(model.first, layout, machine), work(model.last, layout, machine)
    host = software.host * (forwards + 2) / 3
    crosses = stages > 1 and tensor > 1 and layout.ranks > machine.node
    stall = host + software.stall * (tensor - 1) if crosses else 0.0
    group = layout.data * layout.context
    local = max(1, min(group, machine.node // tensor))
    found: dict[tuple[int, bool, bool], Terms] = {}
    slots = []
    most = 0.0
    for stage, layers in enumerate(cuts(model, layout, machine)):
        ends = (layers, stage == 0, stage == stages - 1)
        most = max(most, held(model, layout, layers, stage)) if ends not in found else most
        if ends not in found:
            slot = Terms({name: seconds * layers for name, seconds in layer.items()})
            for part in [first] * ends[1] + [last] * ends[2]:
                for name, seconds in part.items():
                    slot.add(name, seconds)
            if layout.zero == 3:
                _gather(slot, model, layout, layers, machine)
            launched = layers + (ends[1] + ends[2]) / 2
            busy = slot.total()
            joined = (busy**MIXED + (launched * host) ** MIXED) ** (1 / MIXED)
            slot["waiting for the host"] = max(joined, launched * stall) - busy
            if stages > 1:
                slot["pipeline messages"] = _message(model, layout, machine)
            found[ends] = slot
        slots.append(found[ends])
    totals = [slot.total() for slot in slots]
    slowest = max(totals)
    slot, count = slots[totals.index(slowest)], layout.micro_batches
    terms = Terms({name: seconds * count for name, seconds in slot.items()})
    terms["pipeline bubble"] = (sum(totals) - slowest) / layout.chunks
    if layout.zero < 3:
        value = layout.gradient
        if count > 1:  # read the gradient, read and write the sum
            terms["adding gradients"] = count * most * (layout.width + 2 * value) / moving
        hidden = slowest * 2 / 3 if software.overlap or not layout.zero else 0.0
        exchange = _exchange(most, group, local, layout, machine)
        terms["data collectives"] = max(0.0, exchange - hidden)
    terms["optimizer"] = most / layout.shards * UPDATE / moving
    return Terms({name: seconds * machine.factor for name, seconds in terms.items() if seconds})


def _gather(slot: Terms, model: Model, layout: Layout, layers: int, machine: Machine) -> None:
    """Add what the gathers and scatters of ZeRO 3 take beyond the computation that hides them."""
    group = layout.shards
    local = max(1, min(group, machine.node // layout.tensor))
    size = model.layer.weights / layout.tensor * layout.width
    exchange = 3 * layers * ring(size, group, local, machine)
    if layout.data * layout.context > group:  # replicas of the shards add up their gradients
        replicas = layout.data * layout.context // group
        exchange += 2 * layers * ring(size / group, replicas, 1, machine) / layout.micro_batches
    slot["data collectives"] = max(SLOWED * exchange, exchange - slot.total())


def _exchange(weights: float, group: int, local: int, layout: Layout, machine: Machine) -> float:
    """Seconds in which data ranks add up the gradients, and share the weights if ZeRO does."""
    size = weights * layout.gradient
    back = size if not layout.zero else weights * layout.width
    exchange = ring(size, group, local, machine) + ring(back, group, local, machine)
    steps = 2 * math.log2(max(1, group / local))  # of a tree between the nodes
    return exchange + size / BUCKET * steps * machine.software.hop


def _message(model: Model, layout: Layout, machine: Machine) -> float:
    """Seconds in which a stage hands on a micro-batch, and its gradient back."""
    size = model.layer.boundary * layout.width / HALF * layout.micro / layout.context
    size /= layout.tensor if layout.sequence else 1
    if layout.ranks // layout.stages < machine.node:
        return 2 * (size / (machine.chip.inside * LINKS_INSIDE) + HOP_INSIDE)
    return 2 * (size / (machine.chip.between * LINKS_BETWEEN) + machine.software.hop)
