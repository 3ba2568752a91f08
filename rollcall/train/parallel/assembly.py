"""The mesh of the weights, and the parts that spread the model over it."""

import math

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollcall.config import Config
from rollcall.config.mesh import DIMENSIONS, PRESETS
from rollcall.config.plugin import load_attribute
from rollcall.train.numerics.losses import Loss
from rollcall.train.parallel.context import Context
from rollcall.train.parallel.experts import Spread
from rollcall.train.parallel.gradients import Turns
from rollcall.train.parallel.part import Part
from rollcall.train.parallel.replicate import Replicate
from rollcall.train.parallel.shard import Shard, ShardOptimizer
from rollcall.train.parallel.tensor import Tensor
from rollcall.train.ranks.world import World

SHARING = {"expert", "context"}
"""Dimensions whose ranks share the weights of layers without experts as data ranks do."""


def weights_mesh(degrees: dict[str, int], world: World) -> DeviceMesh | None:
    """Return the mesh of the weights without experts, whose ranks hold replicas or shards."""
    if not degrees:
        return None
    over = "shard" if "shard" in degrees else "replicate"
    found = {name: degrees.get(name, 1) for name in DIMENSIONS if name not in SHARING}
    found[over] *= math.prod(degrees.get(name, 1) for name in SHARING)
    named = {*degrees, over} if SHARING & {*degrees} else {*degrees}
    if "replicate" not in named or not named & {"tensor", "pipeline", "expert"}:
        # Otherwise keep all: FSDP then replaces DDP, which supports neither the DTensors of split
        # layers nor a pipeline of two micro-batches (torch 2.15). A mesh of one shard is a replica.
        found = {name: degree for name, degree in found.items() if name in named}
    return init_device_mesh(world.device.type, tuple(found.values()), mesh_dim_names=tuple(found))


def experts_mesh(degrees: dict[str, int], world: World) -> DeviceMesh:
    """Return the mesh of the weights of experts: `expert` divides them, `context` does not."""
    sizes = {name: degrees.get(name, 1) for name in DIMENSIONS}
    ranks = torch.arange(world.world_size).view(*sizes.values())
    ranks = ranks.movedim(DIMENSIONS.index("context"), DIMENSIONS.index("expert")).flatten(2, 3)
    names = tuple(name for name in DIMENSIONS if name != "context")
    return DeviceMesh(world.device.type, ranks, mesh_dim_names=names)


def parts(
    config: Config, world: World, degrees: dict[str, int], mesh: DeviceMesh | None, loss: Loss
) -> list[Part]:
    """Return the parts that spread the model, or a stage of it, in the order of application."""
    options, preset = config.parallel, PRESETS[config.parallel.strategy]
    found: list[Part] = []
    names = (mesh.mesh_dim_names or ()) if mesh else ()
    if mesh and "tensor" in degrees:
        found.append(Tensor(mesh["tensor"], config, degrees.get("context", 1)))
    if "context" in degrees:
        sizes, dimensions = tuple(degrees.values()), tuple(degrees)
        whole = init_device_mesh(world.device.type, sizes, mesh_dim_names=dimensions)
        found.append(Context(whole["context"], config, degrees.get("tensor", 1)))
    averaged = ("replicate", "shard") if options.sync == "step" else ("shard",)
    data = tuple(name for name in names if name in averaged)
    if of_experts := (experts_mesh(degrees, world) if "expert" in degrees else None):
        shards = of_experts["shard"].size()
        found.append(Spread(of_experts["expert"], shards, config.model.name))
    if code := (preset.part or (preset.single_process_part if world.world_size == 1 else "")):
        found.append(load_attribute(code, "parallel.strategy")(config, world, mesh))
    elif mesh and "shard" in data and options.stage > 1:
        # A mesh of one shard has nothing to free after a forward pass.
        stage = options.stage if mesh["shard"].size() > 1 else 2
        rounds, kept = config.precision == "bf16", options.conditional_patterns
        on = of_experts[data] if of_experts else None
        adds_up = options.reduce_scatter == "step"
        found.append(Shard(mesh[data], stage, options.cpu_offload, rounds, kept, on, adds_up))
    # Without DDP if exact mode sums gradients itself, or one rank has nothing to add.
    elif data and not config.exact and (world.world_size > 1 or options.compression != "none"):
        found.append(Replicate(options, world.device))
    if mesh and "shard" in data and options.stage == 1:
        found.append(ShardOptimizer(mesh["shard"]))
    if not loss.turns:
        return found
    is_summed = world.world_size == 1 or any(part.shards for part in found)
    turns = Turns(loss, None if is_summed else 1 / world.world_size)  # DDP wants all gradients
    return [turns, *(part for part in found if not isinstance(part, Replicate))]
