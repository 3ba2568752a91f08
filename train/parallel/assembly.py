"""Over which mesh do the weights lie, and which parts spread the model over it?"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from train.config import Config
from train.parallel.context import Context
from train.parallel.mesh import DIMENSIONS, PRESETS
from train.parallel.part import Part
from train.parallel.replicate import Replicate
from train.parallel.shard import Shard, ShardOptimizer
from train.parallel.tensor import Tensor
from train.plugin import load_attribute
from train.world import World


def weights_mesh(degrees: dict[str, int], world: World) -> DeviceMesh | None:
    """The mesh over which weights lie, from which parts take their dimensions; none for one rank.

    Ranks that share sequences hold replicas of the weights, or further shards of them.
    """
    if not degrees:
        return None
    pieces = degrees.get("context", 1)
    over = "shard" if "shard" in degrees else "replicate"
    found = {name: degrees.get(name, 1) for name in DIMENSIONS if name != "context"}
    found[over] *= pieces
    named = {*degrees, over} if "context" in degrees else {*degrees}
    if "replicate" not in named or not named & {"tensor", "pipeline"}:
        # Else all of them: DDP cannot hold the DTensors of cut layers, and its buckets break in a
        # pipeline of two micro-batches (torch 2.15); FSDP can do both, and one shard is a replica.
        found = {name: degree for name, degree in found.items() if name in named}
    return init_device_mesh(world.device.type, tuple(found.values()), mesh_dim_names=tuple(found))


def parts(
    config: Config, world: World, degrees: dict[str, int], mesh: DeviceMesh | None
) -> list[Part]:
    """What spreads the model, or a stage of it, over the other dimensions, in order.

    Raises:
        ConfigError: a part does not fit the configuration.
    """
    options = config.parallel
    preset = PRESETS[options.strategy]
    found: list[Part] = []
    names = (mesh.mesh_dim_names or ()) if mesh else ()
    if mesh and "tensor" in degrees:
        found.append(Tensor(mesh["tensor"], config, degrees.get("context", 1)))
    if "context" in degrees:
        whole = init_device_mesh(
            world.device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees)
        )
        found.append(Context(whole["context"], config, degrees.get("tensor", 1)))
    # Here the layers are as they are computed, and not yet wrapped: what changes how a layer
    # computes, such as activation checkpointing or compilation, stands between these lines.
    data = tuple(name for name in names if name in ("replicate", "shard"))
    if preset.part or (preset.alone and world.world_size == 1):
        key = f"parallel.strategy={options.strategy}"
        found.append(load_attribute(preset.part or preset.alone, key, ())(config, world, mesh))
    elif mesh and "shard" in data and options.stage > 1:
        # One shard is the whole: there is nothing to give up after a forward.
        stage = options.stage if mesh["shard"].size() > 1 else 2
        found.append(Shard(mesh[data], stage, options.offload))
    elif data and not config.exact:  # which adds up the gradients itself
        found.append(Replicate(options, world.device))
    if mesh and "shard" in data and options.stage == 1:
        found.append(ShardOptimizer(mesh["shard"]))
    return found
