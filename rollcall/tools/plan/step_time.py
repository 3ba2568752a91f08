"""The time of a training step, in seconds, as terms that add up.

A kernel takes the time of a roofline, https://doi.org/10.1145/1498765.1498785, with its two times
added: products at a fraction of the chip's peak, and their operands through the memory. That makes
narrow products slow without a curve. Collectives are rings: a bandwidth, and a latency a step.
"""

import math

from rollcall.tools.plan.layout import Layout, Terms
from rollcall.tools.plan.machine import Machine, Software
from rollcall.tools.plan.model import HALF, Model, Part, attention_flops

MOVING = 0.8
"""Fraction of the memory's bandwidth that streaming kernels reach."""
PASSES = 1.33
"""Bytes that eager kernels move for each byte that the operations need. Fitted."""
LINKS_INSIDE = 0.7
"""Fraction of the links inside a node that collectives reach. Fitted."""
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
BUBBLES = {"zero-bubble": 1 / 3, "zbv": 1 / 5, "dualpipev": 2 / 3}
"""Bubble relative to interleaved 1F1B with equally many pieces, by the papers' formulas with
equal times of forward pass and both halves of the backward pass; ZBV's would be 0."""
Held = tuple[float, float]
"""Weights of a rank without experts, and of its experts."""
Group = tuple[float, int, int]
"""Weights of a rank, how many data ranks hold the same, and how many ranks apart."""
MIXED = 4
"""Norm that joins the host's and the GPU's time of a layer, whose kernels differ in size."""


def ring(size: float, ranks: int, apart: int, machine: Machine) -> float:
    """Seconds of an all-gather or reduce-scatter of `size` bytes; an all-reduce is both.

    Neighbours are `apart` ranks from each other; each brings one link to other nodes.
    """
    if ranks <= 1:
        return 0.0
    rate, hop = machine.chip.inside * LINKS_INSIDE, HOP_INSIDE
    local = max(1, min(ranks, machine.node // apart))
    if local < ranks:
        rate = min(rate, local * machine.chip.between * machine.software.reach)
        hop = machine.software.hop
    return START + (ranks - 1) * (size / ranks / rate + hop)


def all_to_all(size: float, ranks: int, apart: int, machine: Machine, copies: float = 1) -> float:
    """Seconds in which each rank sends `size` bytes, evenly to all ranks, over its own link.

    A program that sends `copies` of each value may send one to a node, which hands them on.
    """
    if ranks == 1:
        return 0.0
    local = max(1, min(ranks, machine.node // apart))
    far = (ranks - local) / (machine.chip.between * machine.software.reach)
    near = (local - 1) / (machine.chip.inside * LINKS_INSIDE)
    if machine.software.once_per_node and ranks > local:
        nodes = ranks / local
        far *= (1 - (1 - 1 / nodes) ** copies) * nodes / copies
        near *= nodes  # each node hands on what all ranks of the group send to it
    hops = (local - 1) * HOP_INSIDE + (ranks > local) * machine.software.hop
    return float(START + size / ranks * (near + far) + hops)


def work(part: Part, layout: Layout, machine: Machine) -> Terms:
    """Seconds of a GPU for one micro-batch of a part, forward and backward."""
    chip, software, tensor = machine.chip, machine.software, layout.tensor
    moving, wide = chip.bandwidth * MOVING, layout.width / HALF
    share = layout.micro / layout.context
    is_layer = part.attention is not None
    reached = chip.tuned_product if software.tuned else chip.product
    again = int(is_layer and layout.recompute == "full")
    is_fp8 = layout.precision == "fp8" and is_layer
    half = "bf16" if layout.precision == "fp8" else layout.precision
    peak = chip.flops[layout.precision if is_fp8 else half]
    terms = Terms()
    # Tensor ranks of rollcall compute whole experts; others divide the tokens.
    folded = tensor if software.folds else 1
    tokens = (layout.imbalance if layout.expert > 1 else 1) / folded
    for number, (rows, inner, columns, cut, experts, often) in enumerate(part.products):
        m = share * rows * (tokens if experts else 1 / folded if cut == "shared" else 1)
        matrices = max(1, math.ceil(experts / layout.expert))
        k = inner / (tensor if cut == "inner" else 1)
        n = columns / (tensor if cut == "columns" else 1)
        moved = layout.width * (m * k + matrices * k * n + m * n)
        if is_fp8 and not software.tuned:  # operands are read in 16 bits and written in 8, twice
            moved += 2 * HALF * (m * k + matrices * k * n)
        # Nothing keeps the output of a layer's last product, so torch does not compute it again.
        is_last = number == len(part.products) - 1 and cut == "inner"
        times = often * (3 + (0 if part.attention and software.early and is_last else again))
        terms.add("matrix products", times * (2 * m * k * n / peak / reached + moved / moving))
    if attention := part.attention:
        forwards = 1 if layout.recompute == "none" or keeps_products(layout, software) else 2
        flops = attention_flops(attention) * share / tensor / chip.flops[half]
        if software.fused:
            rate = (chip.tuned if software.tuned else chip.attention) * software.attention
            rate /= software.ring if layout.context > 1 else 1
            terms["attention"] = flops / rate * (forwards + BACKWARD) * 3.5 / (1 + BACKWARD)
        else:
            scores = attention.heads * attention.length**2 * share / tensor
            terms["attention"] = (forwards + 2) * 2 * flops / reached  # nothing is skipped
            terms["attention"] += (forwards + 2) / 3 * software.scores * wide * scores / moving
    whole = part.moved / (tensor if layout.sequence else 1)
    moved = (whole + part.cut_moved / tensor + part.expert_moved * tokens) * wide * share
    again_moved = again or (is_layer and keeps_products(layout, software))
    moved *= (3 + again_moved) / 3 * software.passes * PASSES
    moved += software.loss_moves * part.outputs * share / tensor
    terms["other operations"] = moved / moving
    if part.messages and tensor > 1:
        size = part.boundary * wide * share
        exchange = (2 + again) * part.messages * ring(size, tensor, 1, machine)
        terms["tensor collectives"] = software.exposed * exchange
    if part.routed and layout.expert > 1:  # there and back, and so do the gradients
        apart = 1 if software.folds else tensor * layout.context
        size, copies = part.routed * wide * share * tokens, max(1, part.routed / part.boundary)
        exchange = (4 + 2 * again) * all_to_all(size, layout.expert, apart, machine, copies)
        terms["expert collectives"] = software.routed * exchange
    if part.attention and layout.context > 1:
        length, heads, width, kv_heads = part.attention
        # Keys and values go around beside the attention, or everything changes its cut before it.
        values = length * width * 2 * (kv_heads + (0 if software.rotates else heads))
        size = layout.width * values * share / tensor
        exchange = (2 + again) * ring(size, layout.context, tensor, machine)
        hidden = terms["attention"] if software.rotates else 0.0
        terms["context collectives"] = _beside(exchange, hidden)
    return terms


def scatters(layout: Layout, software: Software) -> int:
    """Return how often in a step gradients are added up over the data ranks."""
    is_whole = software.whole and not layout.scattered
    is_once = layout.zero < 2 or is_whole or layout.stages > 1
    return 1 if is_once else layout.micro_batches


def keeps_products(layout: Layout, software: Software) -> bool:
    """Return True if torch recomputes all but products and attention."""
    return bool(layout.recompute == "selective" and software.early)


def cuts(model: Model, layout: Layout, machine: Machine) -> list[int]:
    """Return the number of layers of each stage."""
    stages, layers = layout.stages, model.layers
    if not machine.software.balanced:
        return [layers // stages + (stage < layers % stages) for stage in range(stages)]
    head, layer = (
        sum(p.rows * p.inner * p.columns * p.often for p in part.products)
        for part in (model.last, model.layer)
    )
    share = (layers + head / (layer or 1)) / stages
    ends = [min(layers, round(share * (stage + 1))) for stage in range(stages - 1)]
    counts = [end - start for start, end in zip([0, *ends], [*ends, layers], strict=True)]
    return counts if layout.last else counts[::-1]


def held(model: Model, layout: Layout, layers: int, stage: int) -> Held:
    """Return a stage's weights on one rank before ZeRO divides them."""
    parts = [(model.layer, layers)]
    if stage == 0 or (stage == layout.last and model.tied):
        parts.append((model.first, 1))
    if stage == layout.last:
        parts.append((model.last, 1))
    shares = [(*local(part, layout), count) for part, count in parts]
    return sum(n * weights for weights, _, n in shares), sum(n * spread for _, spread, n in shares)


def local(part: Part, layout: Layout) -> Held:
    """Return a part's weights on one rank before ZeRO divides them."""
    rest = part.weights - part.expert_weights - part.cut_weights * (1 - 1 / layout.tensor)
    number = max([1, *(product.experts for product in part.products)])
    return rest, part.expert_weights * math.ceil(number / layout.expert) / number


def of(model: Model, layout: Layout, machine: Machine) -> Terms:
    """Return the terms of a step on the slowest stage's rank; their sum is the step's time."""
    software, moving = machine.software, machine.chip.bandwidth * MOVING
    stages, tensor, count = layout.stages, layout.tensor, layout.micro_batches
    layer, first, last = (work(p, layout, machine) for p in (model.layer, model.first, model.last))
    often, passes = scatters(layout, software), 4 if layout.recompute == "full" else 3
    started = sum(math.ceil(p.experts / layout.expert) * p.often for p in model.layer.products)
    host = (software.host + software.expert * started) * passes / 3
    stalls = stages > 1 and tensor > 1 and layout.ranks > machine.node
    stall = host + software.stall * tensor if stalls else 0.0
    known: dict[tuple[int, bool, bool], Terms] = {}
    slots = []
    most: Held = (0.0, 0.0)
    for stage, layers in enumerate(cuts(model, layout, machine)):
        ends = (layers, stage == 0, stage == layout.last)
        if ends not in known:
            weights = held(model, layout, layers, stage)
            most = max(most, weights, key=sum)
            slot = Terms({name: seconds * layers for name, seconds in layer.items()})
            for name, seconds in [*first.items()] * ends[1] + [*last.items()] * ends[2]:
                slot.add(name, seconds)
            if count > 1:  # read the gradient, read and write the sum
                # A product that adds up its gradient itself does not write it in its own format.
                alone = -layout.width if software.adds else layout.width
                added = sum(weights) if often < count else state(weights, layout, software)
                slot["adding gradients"] = added * (2 * software.reduce + alone) / moving
            busy = slot.total()
            launched = layers + (ends[1] + ends[2]) / 2
            joined = (busy**MIXED + (launched * host) ** MIXED) ** (1 / MIXED)
            slot["waiting for the host"] = max(joined, launched * stall) - busy
            if layout.zero == 3:
                at_ends = ends[1] * model.first.weights + ends[2] * model.last.weights
                gathers = layers * _gathers(local(model.layer, layout), layout, machine)
                gathers += _gathers((at_ends / tensor, 0), layout, machine)
                slot["data collectives"] = _beside(gathers, slot.total())
            if stages > 1:
                messages = layout.chunks * _message(model, layout, machine)
                hidden = slot.total() if layout.chunks > 1 else 0.0  # other pieces compute
                slot["pipeline messages"] = _beside(messages, hidden)
            known[ends] = slot
        slots.append(known[ends])
    slot = max(slots, key=Terms.total)
    slowest, others = slot.total(), sum(map(Terms.total, slots)) - slot.total()
    terms = Terms({name: seconds * count for name, seconds in slot.items()})
    bubble = BUBBLES.get(layout.schedule, count if layout.schedule == "sequential" else 1)
    terms["pipeline bubble"] = others / layout.chunks * bubble
    if layout.zero < 3:
        # All but the first piece of a stage have their gradients while others still compute.
        turns = often + (min(count, stages) - 1) * (1 - 1 / layout.chunks)
        hidden = turns * slowest * 2 / 3 if software.overlap or not layout.zero else 0.0
        terms["data collectives"] = _beside(_exchange(most, model.layer, layout, machine), hidden)
    terms["optimizer"] = state(most, layout, software) * UPDATE / moving
    return Terms({name: seconds * machine.factor for name, seconds in terms.items() if seconds})


def state(weights: Held, layout: Layout, software: Software) -> float:
    """Return the number of weights whose optimizer state a rank has."""
    parts = _groups(weights, layout.shards, layout, software)
    return sum(values / ranks for values, ranks, _ in parts) if layout.zero else sum(weights)


def _groups(weights: Held, ranks: int, layout: Layout, software: Software) -> list[Group]:
    """Return the groups, of `ranks` data ranks, of the weights without experts and of experts."""
    tensor, expert = layout.tensor, layout.expert
    folds = tensor if software.folds and weights[1] else 1
    of_experts = max(1, ranks * folds // expert), tensor * expert // folds
    return [(weights[0], ranks, tensor), (weights[1], *of_experts)]


def _beside(exchange: float, computation: float) -> float:
    """Seconds that an exchange adds to the computation that it overlaps."""
    return max(SLOWED * min(exchange, computation), exchange - computation)


def _gathers(weights: Held, layout: Layout, machine: Machine) -> float:
    """Seconds in a micro-batch in which ZeRO 3 gathers a layer and scatters its gradients."""
    sent, count = machine.software.reduce, layout.micro_batches
    # A pipeline keeps the weights from the first pass on.
    gathers = 1 + 1 / count if layout.stages > 1 else 2
    often = scatters(layout, machine.software) / count
    seconds = 0.0
    for values, group, apart in _groups(weights, layout.shards, layout, machine.software):
        if not values:
            continue
        seconds += gathers * ring(values * layout.width, group, apart, machine)
        seconds += often * ring(values * sent, group, apart, machine)
        replicas = layout.data * layout.context // layout.shards  # they add up their gradients
        seconds += 2 / count * ring(values * sent / group, replicas, group * apart, machine)
    return seconds


def _exchange(weights: Held, layer: Part, layout: Layout, machine: Machine) -> float:
    """Seconds in which data ranks add up the gradients, and share the weights if ZeRO does."""
    seconds = 0.0
    ranks, often = layout.data * layout.context, scatters(layout, machine.software)
    for values, group, apart in _groups(weights, ranks, layout, machine.software):
        size: float = values * machine.software.reduce
        back = values * layout.width if layout.zero else size
        seconds += often * ring(size, group, apart, machine) + ring(back, group, apart, machine)
        if layout.zero == 2:  # a ring for each layer, and no bucket
            units = max(1, values / (sum(local(layer, layout)))) - 1
            seconds += units * (often + 1) * ring(0, group, apart, machine)
        else:  # a tree between nodes for each bucket
            nodes = max(1, min(group * apart / machine.node, group))
            seconds += size / BUCKET * machine.software.hop * 2 * math.log2(nodes)
    return seconds


def _message(model: Model, layout: Layout, machine: Machine) -> float:
    """Seconds in which a stage hands on a micro-batch, and its gradient back."""
    size = model.layer.boundary * layout.width / HALF * layout.micro / layout.context
    size /= layout.tensor if layout.sequence else 1
    return 2 * ring(2 * size, 2, layout.ranks // layout.stages, machine)
