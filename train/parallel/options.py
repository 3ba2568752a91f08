"""Which options of `parallel` can stand together? No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.parallel.mesh import PRESETS, parse

if TYPE_CHECKING:
    from train.schema import Parallel

OF_REPLICAS = ("bucket_mb", "static_graph", "compression")


def check(parallel: Parallel) -> None:
    """Refuse what would be ignored or cannot work, for any world size.

    Raises:
        ValueError: says which options, and what to choose.
    """
    try:
        names = parse(parallel.mesh_text)
    except ValueError as error:
        raise ValueError(f"parallel.mesh={parallel.mesh}: {error}") from None
    if parallel.mesh is not None and not PRESETS[parallel.strategy].mesh:
        raise ValueError(
            f"parallel.mesh={parallel.mesh} is for several ranks, but "
            f"parallel.strategy={parallel.strategy} is for one: leave one of the two out"
        )
    cut = "tensor" in names or "pipeline" in names
    if parallel.stage == 1 and cut:
        raise ValueError(
            "parallel.strategy=zero1 divides the optimizer of whole models and cannot do so on a "
            "mesh with tensor or pipeline: choose zero2 or zero3"
        )
    in_shards = "shard" in names and parallel.stage > 1
    if parallel.offload and not in_shards:
        raise ValueError(
            "parallel.offload=true moves the shards of zero2, zero3 and hsdp to the host, and "
            "this run has none: choose one of them"
        )
    in_data = "replicate" in names or "shard" in names
    in_replicas = in_data and not in_shards and not cut
    for name in OF_REPLICAS:
        is_set = getattr(parallel, name) != type(parallel).model_fields[name].default
        if is_set and not in_replicas:
            raise ValueError(
                f"parallel.{name} is an option of ddp and zero1, and this run uses neither: "
                "choose one of them, or leave it out"
            )
    if parallel.schedule == "gpipe" and "pipeline" not in names:
        raise ValueError(
            "parallel.schedule=gpipe is an option of pipelines, and this run has none: choose "
            "parallel.strategy=pipeline or a mesh with one, or leave it out"
        )
