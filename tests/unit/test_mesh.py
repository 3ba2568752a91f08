from __future__ import annotations

import typing

import pytest

from train.config import parse
from train.parallel import mesh
from train.schema import ConfigError, Parallel


@pytest.mark.parametrize(
    ("words", "world_size", "node_size", "degrees"),
    [
        ("strategy=ddp", 6, 2, {"replicate": 6}),
        ("strategy=hsdp", 8, 4, {"replicate": 2, "shard": 4}),
        ("strategy=single", 1, 1, {}),
        ("mesh=tensor=2,shard=rest", 8, 8, {"shard": 4, "tensor": 2}),
        ("mesh=shard=node,replicate=3", 6, 2, {"replicate": 3, "shard": 2}),
    ],
)
def test_degrees(words: str, world_size: int, node_size: int, degrees: dict[str, int]) -> None:
    parallel = parse([f"parallel.{words}"])[1].parallel
    found = parallel.degrees(world_size, node_size)
    assert list(found.items()) == list(degrees.items())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("strategy=single", "needs 1 rank, but 6 were started; parallel.strategy=ddp trains"),
        ("mesh=replicate=2,shard=4", "needs 8 ranks, but 6 .* is replicate=2,shard=3"),
        ("mesh=shard=4,replicate=rest", "a multiple of 4 ranks, but 6 .* is replicate=2,shard=3"),
        ("strategy=hsdp", "a multiple of 4 ranks, but 6 were started"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(words: str, expected: str) -> None:
    parallel = parse([f"parallel.{words}"])[1].parallel
    with pytest.raises(ConfigError, match=expected):
        parallel.degrees(6, 4)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["mesh=shards=2"], "no dimension 'shards'; did you mean 'shard'?"),
        (["mesh=shard"], "shard=: expected a number"),
        (["mesh=shard=0"], "a degree is at least 1"),
        (["mesh=shard=2,shard=2"], "given twice"),
        (["mesh=shard=rest,tensor=rest"], "only one dimension"),
        (["strategy=single", "mesh=shard=2"], "leave one of the two out"),
        (["strategy=zero1", "mesh=shard=2,tensor=2"], "choose zero2 or zero3"),
        (["strategy=zero1", "offload=true"], "choose one of them"),
        (["strategy=zero3", "compression=fp16"], "parallel.compression is an option of ddp"),
        (["strategy=pipeline", "bucket_mb=1"], "parallel.bucket_mb is an option of ddp"),
        (["strategy=ddp", "schedule=gpipe"], "this run has none"),
        (["strategy=tensor", "static_graph=true"], "parallel.static_graph is an option of ddp"),
    ],
)
def test_contradictions_are_refused(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse([f"parallel.{word}" for word in words])
    assert expected in str(refusal.value)


def test_every_strategy_of_the_schema_has_a_mesh() -> None:
    strategies = typing.get_args(Parallel.model_fields["strategy"].annotation)
    assert set(strategies) == set(mesh.PRESETS)


def test_stages_are_balanced() -> None:
    from train.parallel.pipeline import balance

    assert balance([1, 1, 1, 3], 2) == [0, 3, 4]
    assert balance([5, 1, 1, 1, 1], 3) == [0, 1, 3, 5]
    assert balance([1, 2], 1) == [0, 2]
