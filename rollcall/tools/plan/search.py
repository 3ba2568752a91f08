"""All sensible layouts of a model on a number of GPUs, the fastest first."""

import dataclasses
from collections.abc import Iterator
from contextlib import suppress

from rollcall.config.mesh import show
from rollcall.messages.refusal import RefusedError
from rollcall.tools.plan import memory, step_time
from rollcall.tools.plan.layout import Layout, Terms
from rollcall.tools.plan.machine import Machine, Machines
from rollcall.tools.plan.model import Model

LONG = 8192
"""Tokens from which on it can pay to divide a sequence over ranks."""


@dataclasses.dataclass(frozen=True)
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
        shards = (layout.shard or layout.data) if layout.zero else 1
        degrees = {"pipeline": layout.stages, "replicate": layout.data // shards, "shard": shards}
        degrees |= {"context": layout.context, "tensor": layout.tensor}
        mesh = {name: degree for name, degree in degrees.items() if degree > 1}
        words = [
            f"parallel.mesh={show(mesh)}" if mesh else "parallel.strategy=single",
            f"data.global_batch={layout.batch}",
            f"data.micro_batch={layout.micro}",
            f"precision={layout.precision}",
        ]
        if layout.zero:  # the recipe may have another strategy; the first word names the layout
            words.insert(int(layout.zero == 3), f"parallel.strategy=zero{layout.zero}")
        if layout.tensor > 1:
            words.append("parallel.sequence_parallel=true")
        if layout.recompute == "full":
            words.append("model.activation_checkpointing=blocks")
        return words


def search(
    model: Model, gpus: int, batch: int, machine: Machine, precision: str, **asked: object
) -> list[Choice]:
    """Return the layouts that fit, the fastest first; of equal meshes only the fastest.

    All have the attributes of `Layout` that are asked for.

    Raises:
        RefusedError: the number of GPUs, or the batch, cannot be divided.
    """
    host = machine.host
    if gpus > host and gpus % host:
        whole = gpus // host * host
        raise RefusedError(
            f"--gpus {gpus}: expected a multiple of the {host} GPUs of a node, such as "
            f"{whole} or {whole + host}"
        )
    best: dict[tuple[int, ...], Choice] = {}
    for layout in layouts(model, gpus, batch, machine, precision):
        needed = memory.of(model, layout, machine)
        is_asked = all(getattr(layout, name) == value for name, value in asked.items())
        if not is_asked or not memory.fits(needed, machine):
            continue
        choice = Choice(layout, step_time.of(model, layout, machine), needed)
        if layout.mesh not in best or choice.time < best[layout.mesh].time:
            best[layout.mesh] = choice
    return sorted(best.values(), key=lambda choice: choice.time)


def layouts(
    model: Model, gpus: int, batch: int, machine: Machine, precision: str
) -> Iterator[Layout]:
    """Yield the sensible layouts: tensor groups inside a node, powers of two, full shares."""
    node = min(gpus, machine.node)
    for tensor in _powers(node):
        if model.divides % tensor:
            continue
        for stages in _powers(min(model.layers, gpus // tensor)):
            for context in _powers(8 if model.length >= LONG and model.divides > 1 else 1):
                heads = model.layer.attention.heads if model.layer.attention else context
                if heads % (tensor * context):
                    continue
                data, rest = divmod(gpus, tensor * stages * context)
                if rest or not data or batch < data:
                    continue
                base = Layout(data, tensor, stages, context, batch=batch, precision=precision)
                yield from _of_mesh(base, -(-batch // data), node // tensor)


def _of_mesh(base: Layout, share: int, near: int) -> Iterator[Layout]:
    """Yield a mesh with every way to divide the weights, micro-batch and recomputation."""
    ways = [(0, 0)]
    if base.data > 1:
        ways.append((3, 0))
        if base.ranks == base.data:
            ways.append((2, 0))
        ways += [(3, near * k) for k in _powers(base.data // near) if base.data % (near * k) == 0]
    for zero, shard in (way for way in ways if way[1] not in (1, base.data)):
        for micro in _powers(share):
            if base.stages > 1 and -(-share // micro) < base.stages:
                continue
            for recompute in ("none", "full"):
                yield dataclasses.replace(
                    base, zero=zero, shard=shard, micro=micro, recompute=recompute
                )


def smallest(model: Model, gpus: int, machine: Machine, precision: str) -> Choice | None:
    """Return the fastest layout on the fewest GPUs that fit one sample per rank."""
    for count in [*_powers(machine.node), *range(2 * machine.node, gpus + 1, machine.node)]:
        if count <= gpus and (fitting := search(model, count, count, machine, precision)):
            return fitting[0]
    return None


def levers(
    model: Model, best: Choice, machine: Machine, machines: Machines, precision: str
) -> list[tuple[str, float]]:
    """Return changes with the speed that each would bring, the most effective first."""
    gpus, batch = best.layout.ranks, best.layout.batch
    tried = [(f"{2 * gpus} GPUs", machine, 2 * gpus, batch, precision)]
    tried.append((f"{2 * gpus} GPUs and twice the batch", machine, 2 * gpus, 2 * batch, precision))
    for chip in map(machines.chip, ("H100", "B200")):
        if chip.name != machine.chip.name and precision in chip.flops:
            is_usual = machine.node == machine.chip.node
            node = chip.node if is_usual else min(machine.node, chip.node)
            other = dataclasses.replace(machine, chip=chip, node=node)  # a factor cancels out
            tried.append((f"{gpus} {chip.name}", other, gpus, batch, precision))
    if precision == "bf16" and "fp8" in machine.chip.flops:
        tried.append(("precision=fp8", machine, gpus, batch, "fp8"))
    speeds = []
    for name, other_machine, count, samples, format_ in tried:
        with suppress(RefusedError):  # these GPUs do not fill whole nodes
            for choice in search(model, count, samples, other_machine, format_)[:1]:
                speeds.append((name, samples / choice.time / (batch / best.time)))
    return sorted(speeds, key=lambda pair: -pair[1])


def _powers(limit: int) -> list[int]:
    return [2**power for power in range(limit.bit_length())]
