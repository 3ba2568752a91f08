"""Which options of `parallel` can stand together? No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.parallel.mesh import PRESETS, parse

if TYPE_CHECKING:
    from train.schema import Parallel

OF_REPLICAS = ("bucket_mb", "static_graph", "compression")
V_SHAPED = ("zbv", "dualpipev")
SPLIT_BACKWARD = ("zero-bubble", *V_SHAPED)
LOOPED = ("interleaved", "breadth-first", *SPLIT_BACKWARD)


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
    in_data = "replicate" in names or "shard" in names or "context" in names
    looped = parallel.schedule_name in LOOPED
    for keys, is_used, users, choice in (
        (("offload",), in_shards, "zero2, zero3 and hsdp", "choose one of them"),
        (OF_REPLICAS, in_data and not in_shards and not cut, "ddp and zero1", "choose one of them"),
        (("schedule", "balance"), "pipeline" in names, "pipelines", "choose pipeline or split"),
        (("stages_per_rank",), looped, ", ".join(LOOPED), "choose one as parallel.schedule"),
        (("sequence",), "tensor" in names, "cut layers", "choose tensor or a mesh with it"),
    ):
        for key in keys:
            is_set = getattr(parallel, key) != type(parallel).model_fields[key].default
            if is_set and not is_used:
                raise ValueError(
                    f"parallel.{key} is an option of {users}, and this run has none of them: "
                    f"{choice}, or leave it out"
                )
    if parallel.schedule_name in SPLIT_BACKWARD and "shard" in names and parallel.stage == 3:
        raise ValueError(
            f"parallel.schedule={parallel.schedule_name} computes the gradients of weights later "
            "than those of inputs, so weights must stay gathered in between: choose "
            "parallel.strategy=zero2"
        )
    if parallel.schedule_name in V_SHAPED and parallel.stages_per_rank != 2:
        raise ValueError(
            f"parallel.schedule={parallel.schedule_name} has two stages on each rank, not "
            f"parallel.stages_per_rank={parallel.stages_per_rank}: leave it out"
        )
