"""All sensible layouts of a model on a number of GPUs, the fastest first."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from rollcall.config.checks import SPLIT_BACKWARD
from rollcall.config.mesh import show
from rollcall.messages.refusal import RefusedError
from rollcall.tools.plan import memory, step_time
from rollcall.tools.plan.layout import Layout, Terms
from rollcall.tools.plan.machine import Machine
from rollcall.tools.plan.model import Model

LONG = 8192
"""Tokens from which on it can pay to divide a sequence over ranks."""
SCHEDULES = [("1f1b", 1), *(("interleaved", chunks) for chunks in (2, 4, 8))]
SCHEDULES += [(name, 2) for name in ("zero-bubble", "zbv", "dualpipev")]
"""Schedules of pipelines to try, with the stages of a rank."""


@dataclass(frozen=True)
class Choice:
    """A layout that fits, with what it needs."""

    layout: Layout
    seconds: Terms
    bytes: Terms

    @property
    def time(self) -> float:
        """Seconds of a step."""
        return self.seconds.total()

    def words(self) -> list[str]:
        """Return the `key=value` words that give a run this layout."""
        layout = self.layout
        shards = (layout.shard or layout.data) // layout.expert if layout.zero else 1
        replicas = layout.data // shards // layout.expert
        degrees = {"pipeline": layout.stages, "replicate": replicas, "shard": shards}
        degrees |= {"expert": layout.expert, "context": layout.context, "tensor": layout.tensor}
        mesh = {name: degree for name, degree in degrees.items() if degree > 1}
        words = [
            f"parallel.mesh={show(mesh)}" if mesh else "parallel.strategy=single",
            f"data.global_batch={layout.batch}",
            f"data.micro_batch={layout.micro}",
            f"precision={layout.precision}",
        ]
        if layout.zero:  # the recipe may have another strategy
            words.insert(1, f"parallel.strategy=zero{layout.zero}")
        if layout.tensor > 1:
            words.append("parallel.sequence_parallel=true")
        if layout.schedule != "1f1b":
            words.append(f"parallel.schedule={layout.schedule}")
        if layout.chunks > 2:
            words.append(f"parallel.stages_per_rank={layout.chunks}")
        if layout.recompute != "none":
            kind = "blocks" if layout.recompute == "full" else layout.recompute
            words.append(f"model.activation_checkpointing={kind}")
        return words


def search(model: Model, gpus: int, machine: Machine, asked: Layout, *fixed: str) -> list[Choice]:
    """Return the layouts that fit, the fastest first; of equal meshes only the fastest.

    All have the batch, the precision and the imbalance of the one that is asked for, and its
    `fixed` attributes. RefusedError is raised if the GPUs do not fill nodes.
    """
    if gpus > machine.host and gpus % machine.host:
        whole = gpus // machine.host * machine.host
        raise RefusedError(
            f"--gpus {gpus}: expected a multiple of the {machine.host} GPUs of a node, such as "
            f"{whole} or {whole + machine.host}"
        )
    best: dict[tuple[int, ...], Choice] = {}
    for layout, needed in layouts(model, gpus, machine, asked, *fixed):
        if not memory.fits(needed, machine):
            continue
        choice = Choice(layout, step_time.of(model, layout, machine), needed)
        if layout.mesh not in best or choice.time < best[layout.mesh].time:
            best[layout.mesh] = choice
    return sorted(best.values(), key=lambda choice: choice.time)


def problem(model: Model, layout: Layout) -> str:
    """Return which rule of rollcall a layout breaks, and by how much; empty if none."""
    tensor, stages, count = layout.tensor, layout.stages, layout.micro_batches
    pieces, schedule = stages * layout.chunks, layout.schedule
    heads = model.layer.attention.heads if model.layer.attention else 0
    if model.divides % tensor:
        return f"tensor={tensor} does not divide {model.divides} key-value heads"
    if heads % (tensor * layout.context):
        return f"tensor={tensor} times context={layout.context} does not divide {heads} heads"
    if model.experts <= -(-model.experts // layout.expert) * (layout.expert - 1):
        return f"expert={layout.expert} leaves a rank without any of {model.experts} experts"
    shards = (layout.shard or layout.data) // layout.expert if layout.zero else 1
    units = [p.inner for p in model.layer.products if p.experts and p.inner % shards]
    if units and layout.expert > 1:
        return f"{shards} shards do not divide an expert's {units[0]} units"
    if layout.batch < layout.data:
        return f"a batch of {layout.batch} is too small for {layout.data} data ranks"
    if stages == 1:
        return ""
    least = 2 * stages if schedule == "dualpipev" else stages
    rounds = max(1, count // stages)
    if pieces > model.layers + 2:  # the ends count as layers
        return f"{pieces} stages need a layer each, but the model has {model.layers}"
    if count < least and schedule not in ("gpipe", "sequential"):
        return f"{schedule} needs {least} micro-batches, but the batch makes {count}"
    if schedule in ("interleaved", "zero-bubble") and count % rounds:
        return f"{schedule} needs a multiple of {rounds} micro-batches, but the batch makes {count}"
    if schedule in SPLIT_BACKWARD and (layout.zero == 3 or layout.recompute != "none"):
        return f"{schedule} works neither with zero3 nor with recomputation"
    return ""


def layouts(
    model: Model, gpus: int, machine: Machine, asked: Layout, *fixed: str
) -> Iterator[tuple[Layout, Terms]]:
    """Yield what rollcall can run, with the memory that it needs.

    Tensor groups are inside a node, and degrees are powers of two. Of micro-batches that do not fit
    there is only the smallest; without a pipeline, only the largest that fits. A pipeline
    has many micro-batches, and recomputes only if nothing fits without.
    """
    schedules = [(asked.schedule, asked.chunks)] if "schedule" in fixed else SCHEDULES
    recomputes = [asked.recompute] if "recompute" in fixed else ["none", "selective", "full"]
    for mesh in [asked] if "mesh" in fixed else _meshes(model, gpus, machine, asked):
        most = min(-(-mesh.batch // mesh.data), mesh.batch if mesh.stages == 1 else 8)
        micros = [asked.micro] if "micro" in fixed else _powers(most)
        leanest = replace(mesh, micro=micros[0], recompute=recomputes[-1], chunks=1)
        leanest = replace(leanest, schedule="1f1b")
        needed = memory.of(model, leanest, machine)
        if not memory.fits(needed, machine):
            if not problem(model, leanest):
                yield leanest, needed
            continue
        for schedule, chunks in schedules if mesh.stages > 1 else [("1f1b", 1)]:
            largest = 0
            for recompute in recomputes:
                tried = []
                if largest and mesh.stages > 1:
                    break
                for micro in [size for size in micros if size > largest]:
                    layout = replace(mesh, schedule=schedule, chunks=chunks, micro=micro)
                    layout = replace(layout, recompute=recompute)
                    if problem(model, layout):
                        continue
                    tried.append((layout, memory.of(model, layout, machine)))
                    if not memory.fits(tried[-1][1], machine):
                        break
                    largest = micro
                yield from tried if mesh.stages > 1 else tried[-2:]


def _meshes(model: Model, gpus: int, machine: Machine, asked: Layout) -> Iterator[Layout]:
    """Yield meshes with every way to divide the weights."""
    node = min(gpus, machine.node)
    contexts = _powers(8 if model.length >= LONG and model.divides > 1 else 1)
    stages = _powers(min(model.layers, gpus))
    for tensor, count, context in product(_powers(node), stages, contexts):
        data, rest = divmod(gpus, tensor * count * context)
        for expert in [] if rest else _powers(min(data, model.experts)):
            base = replace(asked, data=data, tensor=tensor, context=context, expert=expert)
            if data % expert or problem(model, base):
                continue
            ways = [(0, 0)]
            if data > expert:
                ways += [(3, 0), (2, 0)] + [(1, 0)] * (gpus == data and expert == 1)
                near = max(expert, node // tensor)
                ways += [(3, near * k) for k in _powers(data // near) if data % (near * k) == 0]
            for zero, shard in ways:
                if shard not in (1, expert, data):
                    yield replace(base, stages=count, zero=zero, shard=shard, sequence=True)


def smallest(model: Model, gpus: int, machine: Machine, asked: Layout) -> Choice | None:
    """Return the fastest layout on the fewest GPUs that fit one sample per rank."""
    for count in [*_powers(machine.node), *range(2 * machine.node, gpus + 1, machine.node)]:
        least = replace(asked, batch=count)
        if count <= gpus and (fitting := search(model, count, machine, least, "schedule")):
            return fitting[0]
    return None


def _powers(limit: int) -> list[int]:
    return [2**power for power in range(limit.bit_length())]
