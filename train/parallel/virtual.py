"""Virtual shards: into which fixed pieces does exact mode cut a batch? No torch.

The pieces and the order in which they are added depend on the configuration alone, so any number
of ranks that holds equally many of them computes the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.parallel.mesh import parse

if TYPE_CHECKING:
    from train.schema import Config

STRATEGIES = ("single", "ddp")


def check(config: Config) -> None:
    """Refuse what exact mode cannot keep equal for every number of ranks.

    Raises:
        ValueError: says which key, and what to choose.
    """
    if not config.exact:
        _check_unused(config)
        return
    parallel = config.parallel
    if parallel.strategy not in STRATEGIES or set(parse(parallel.mesh_text)) - {"replicate"}:
        mesh = parallel.mesh
        spread = f"strategy={parallel.strategy}" if mesh is None else f"mesh={mesh}"
        raise ValueError(
            f"exact=true adds up whole gradients in an order of its own and cannot do so with "
            f"parallel.{spread}: choose parallel.strategy=ddp or single"
        )
    for name in ("bucket_mb", "static_graph", "compression"):
        if getattr(parallel, name) != type(parallel).model_fields[name].default:
            raise ValueError(
                f"parallel.{name} is an option of DistributedDataParallel, which exact=true does "
                "not use: leave it out"
            )
    if config.data.micro_batch is not None:
        raise ValueError(
            "data.micro_batch cuts the share of a rank, but with exact=true every virtual shard "
            "is one micro-batch: leave it out, or raise exact_shards for smaller ones"
        )


def _check_unused(config: Config) -> None:
    for key, is_set in (
        ("exact_shards", config.exact_shards != type(config).model_fields["exact_shards"].default),
        ("log.fingerprints", config.log.fingerprints),
    ):
        if is_set:
            raise ValueError(f"{key} is an option of exact mode: add exact=true, or leave it out")


def check_ranks(world_size: int, shards: int) -> None:
    """Refuse a number of ranks that cannot share the tree equally.

    Raises:
        ValueError: names the numbers that can.
    """
    fitting = [2**k for k in range(shards.bit_length())]
    if world_size not in fitting:
        more = f" (more with exact_shards above {shards})" if world_size > shards else ""
        raise ValueError(
            f"exact=true works on {', '.join(map(str, fitting[:-1]))} or {shards} ranks{more}, "
            f"but {world_size} were started"
        )


def own(rank: int, world_size: int, shards: int) -> range:
    """The shards of a rank: neighbours, so that its part of the tree is whole."""
    each = shards // world_size
    return range(rank * each, (rank + 1) * each)
