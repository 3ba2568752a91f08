"""The time of a training step, in seconds, as terms that add up.

A kernel takes the time of a roofline, https://doi.org/10.1145/1498765.1498785, with its two times
added: products at a fraction of the chip's peak, and their operands through the memory. That makes
narrow products slow without a curve. Collectives are rings: a bandwidth, and a latency a step.
"""

import math

from rollcall.tools.plan.layout import Layout, Terms
from rollcall.tools.plan.machine import Machine
from rollcall.tools.plan.model import HALF, Model, Part, attention_flops

MOVING = 0.8
"""Fraction of the memory's bandwidth that streaming kernels reach."""
PASSES = 1.33
"""Bytes that eager kernels move for each byte that the operations need. Fitted."""
LINKS_INSIDE = 0.7
"""Fraction of the links inside a node that collectives reach. Fitted."""
LINKS_BETWEEN = 0.49
"""Fraction of the links between nodes that collectives reach. Fitted."""
SLOWED = 0.38
"""Time by which a collective slows the computation beside it, relative to it. Fitted."""
START = 8.4e-6
"""Seconds in which a collective starts, as NCCL's own table of latencies (tuning.cc) has it."""
HOP_INSIDE = 3.4e-6
"""Seconds of one step of a ring over NVLink, from the same table."""
BACKWARD = 3.2
"""Time of fused attention's backward pass for each of its forward pass: 2.5 times the products at
lower speed, as https://arxiv.org/abs/2307.08691 and https://arxiv.org/abs/2407.08608 measure."""
UPDATE = 30
"""Bytes that Adam moves for each weight: gradient, master copy and two moments, and the weight."""
FULL = 4
"""Bytes of a value in fp32, in which gradients are added up."""
BUCKET = 25e6
"""Bytes of gradients that one all-reduce carries: DDP's default."""
MIXED = 4
"""Norm that joins the host's and the GPU's time of a layer, whose kernels differ in size."""


def ring(size: float, ranks: int, apart: int, machine: Machine) -> float:
    """Seconds of an all-gather or reduce-scatter of `size` bytes; an all-reduce is both.

    Neighbours are `apart` ranks from each other; each brings one link to other nodes.
    """
    if ranks == 1:
        return 0.0
    rate, hop = machine.chip.inside * LINKS_INSIDE, HOP_INSIDE
    local = max(1, min(ranks, machine.node // apart))
    if local < ranks:
        rate = min(rate, local * machine.chip.between * LINKS_BETWEEN)
        hop = machine.software.hop
    return START + (ranks - 1) * (size / ranks / rate + hop)


def work(part: Part, layout: Layout, machine: Machine) -> Terms:
    """Seconds of a GPU for one micro-batch of a part, forward and backward."""
    chip, software, tensor = machine.chip, machine.software, part.ranks(layout.tensor)
    moving, wide = chip.bandwidth * MOVING, layout.width / HALF
    share = layout.micro / layout.context
    is_layer = part.messages > 0
    again = int(is_layer and layout.recompute == "full")
    is_fp8 = layout.precision == "fp8" and is_layer
    half = "bf16" if layout.precision == "fp8" else layout.precision
    peak = chip.flops[layout.precision if is_fp8 else half]
    terms = Terms()
    for number, (rows, inner, columns, cut) in enumerate(part.products):
        m = share * rows
        k = inner / (tensor if cut == "inner" else 1)
        n = columns / (tensor if cut == "columns" else 1)
        moved = layout.width * (m * k + k * n + m * n)
        if is_fp8 and not software.tuned:  # operands are read in 16 bits and written in 8, twice
            moved += 2 * HALF * (m * k + k * n)
        # Nothing keeps the output of a layer's last product, so torch does not compute it again.
        is_kept = part.attention and software.early and number == len(part.products) - 1
        times = 3 + (0 if is_kept else again)
        terms.add("matrix products", times * (2 * m * k * n / peak / chip.product + moved / moving))
    if attention := part.attention:
        forwards = 1 if layout.recompute == "none" else 2
        flops = attention_flops(attention) * share / tensor / chip.flops[half]
        if software.fused:
            rate = (chip.tuned if software.tuned else chip.attention) * software.attention
            terms["attention"] = flops / rate * (forwards + BACKWARD) * 3.5 / (1 + BACKWARD)
        else:
            scores = attention.heads * attention.length**2 * share / tensor
            terms["attention"] = (forwards + 2) * 2 * flops / chip.product  # nothing is skipped
            terms["attention"] += (forwards + 2) / 3 * software.scores * wide * scores / moving
    whole = part.moved / (tensor if layout.sequence else 1)
    moved = (whole + part.cut_moved / tensor) * wide * share
    moved *= (3 + again) / 3 * software.passes * PASSES
    moved += software.loss_moves * part.outputs * share / tensor
    terms["other operations"] = moved / moving
    if part.messages and tensor > 1:
        size = part.boundary * wide * share
        exchange = (2 + again) * part.messages * ring(size, tensor, 1, machine)
        terms["tensor collectives"] = software.exposed * exchange
    if part.attention and layout.context > 1:
        length, heads, width, kv_heads = part.attention
        # Keys and values go around beside the attention, or everything changes its cut before it.
        values = length * width * 2 * (kv_heads + (0 if software.rotates else heads))
        size = layout.width * values * share / tensor
        exchange = (2 + again) * ring(size, layout.context, tensor, machine)
        hidden = terms["attention"] if software.rotates else 0.0
        terms["context collectives"] = _beside(exchange, hidden)
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
    return sum(
        count * (part.weights - part.cut_weights * (1 - 1 / part.ranks(layout.tensor)))
        for part, count in parts
    )


def of(model: Model, layout: Layout, machine: Machine) -> Terms:
    """Return the terms of a step on the slowest stage's rank; their sum is the step's time."""
    software, moving = machine.software, machine.chip.bandwidth * MOVING
    stages, tensor, count = layout.stages, layout.tensor, layout.micro_batches
    layer, first, last = (work(p, layout, machine) for p in (model.layer, model.first, model.last))
    host = software.host * (4 if layout.recompute == "full" else 3) / 3
    stalls = stages > 1 and tensor > 1 and layout.ranks > machine.node
    stall = host + software.stall * tensor if stalls else 0.0
    known: dict[tuple[int, bool, bool], Terms] = {}
    slots = []
    most = 0.0
    for stage, layers in enumerate(cuts(model, layout, machine)):
        ends = (layers, stage == 0, stage == stages - 1)
        if ends not in known:
            weights = held(model, layout, layers, stage)
            most = max(most, weights)
            slot = Terms({name: seconds * layers for name, seconds in layer.items()})
            for name, seconds in [*first.items()] * ends[1] + [*last.items()] * ends[2]:
                slot.add(name, seconds)
            if layout.zero < 3 and count > 1:  # read the gradient, read and write the sum
                # A product that adds up its gradient itself does not write it in its own format.
                alone = -layout.width if software.adds else layout.width
                slot["adding gradients"] = weights * (2 * software.reduce + alone) / moving
            busy = slot.total()
            launched = layers + (ends[1] + ends[2]) / 2
            joined = (busy**MIXED + (launched * host) ** MIXED) ** (1 / MIXED)
            slot["waiting for the host"] = max(joined, launched * stall) - busy
            if layout.zero == 3:
                ends_weights = ends[1] * model.first.weights + ends[2] * model.last.weights
                gathers = layers * _gathers(model.layer.weights, layout, machine)
                gathers += _gathers(ends_weights, layout, machine)
                slot["data collectives"] = _beside(gathers, slot.total())
            if stages > 1:
                messages = layout.chunks * _message(model, layout, machine)
                hidden = slot.total() if layout.chunks > 1 else 0.0  # other pieces compute
                slot["pipeline messages"] = _beside(messages, hidden)
            known[ends] = slot
        slots.append(known[ends])
    totals = [slot.total() for slot in slots]
    slowest = max(totals)
    slot = slots[totals.index(slowest)]
    terms = Terms({name: seconds * count for name, seconds in slot.items()})
    terms["pipeline bubble"] = (sum(totals) - slowest) / layout.chunks
    if layout.zero < 3:
        hidden = slowest * 2 / 3 if software.overlap or not layout.zero else 0.0
        terms["data collectives"] = _beside(_exchange(model, most, layout, machine), hidden)
    terms["optimizer"] = most / layout.shards * UPDATE / moving
    return Terms({name: seconds * machine.factor for name, seconds in terms.items() if seconds})


def _beside(exchange: float, computation: float) -> float:
    """Seconds that an exchange adds to the computation that it overlaps."""
    return max(SLOWED * min(exchange, computation), exchange - computation)


def _gathers(weights: int, layout: Layout, machine: Machine) -> float:
    """Seconds in which ZeRO 3 gathers a layer twice and scatters its gradients."""
    group, tensor, sent = layout.shards, layout.tensor, machine.software.reduce
    values = weights / tensor
    exchange = 2 * ring(values * layout.width, group, tensor, machine)
    exchange += ring(values * sent, group, tensor, machine)
    replicas = layout.data * layout.context // group  # they add up their shards' gradients
    added = 2 * ring(values * sent / group, replicas, group * tensor, machine)
    return exchange + added / layout.micro_batches


def _exchange(model: Model, weights: float, layout: Layout, machine: Machine) -> float:
    """Seconds in which data ranks add up the gradients, and share the weights if ZeRO does."""
    group, tensor = layout.data * layout.context, layout.tensor
    size: float = weights * machine.software.reduce
    back = weights * layout.width if layout.zero else size
    exchange = ring(size, group, tensor, machine) + ring(back, group, tensor, machine)
    if layout.zero == 2:  # a ring for each layer, and no bucket
        units = weights / (model.layer.weights / tensor) - 1
        return exchange + units * 2 * ring(0, group, tensor, machine)
    nodes = min(group * tensor / machine.node, group)
    hop: float = machine.software.hop * 2 * math.log2(max(1, nodes))  # of a tree between nodes
    return exchange + size / BUCKET * hop


def _message(model: Model, layout: Layout, machine: Machine) -> float:
    """Seconds in which a stage hands on a micro-batch, and its gradient back."""
    size = model.layer.boundary * layout.width / HALF * layout.micro / layout.context
    size /= layout.tensor if layout.sequence else 1
    rate, hop = machine.chip.inside * LINKS_INSIDE, HOP_INSIDE
    if layout.ranks // layout.stages >= machine.node:
        rate, hop = machine.chip.between * LINKS_BETWEEN, machine.software.hop
    return 2 * (size / rate + hop)
