from __future__ import annotations

import types
import typing

import pytest

from rollcall.config import parse
from rollcall.config.schema import ConfigError, Parallel


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
        ("strategy=single", "needs 1 rank, but got 6; start that number, choose a mesh of 6, or"),
        ("mesh=replicate=2,shard=4", "needs 8 ranks, but got 6"),
        ("mesh=shard=4,replicate=rest", "a multiple of 4 ranks, but got 6"),
        ("strategy=hsdp", "a multiple of 4 ranks, but got 6"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(words: str, expected: str) -> None:
    parallel = parse([f"parallel.{words}"])[1].parallel
    with pytest.raises(ConfigError, match=expected):
        parallel.degrees(6, 4)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["mesh=shards=2"], "unknown dimension 'shards', did you mean 'shard'?"),
        (["mesh=tp:4"], "unknown dimension 'tp:4'; write name=degree, such as tensor=4, with "),
        (["mesh=shard"], "shard: expected a number, node or rest, got ''"),
        (["mesh=shard=0"], "shard: expected at least 1, got 0"),
        (["mesh=shard=2,shard=2"], "given twice"),
        (["mesh=shard=rest,tensor=rest"], "only one dimension"),
        (["strategy=single", "mesh=shard=2"], "remove one of the two"),
        (["strategy=zero1", "mesh=shard=2,tensor=2"], "choose zero2 or zero3"),
        (["strategy=zero1", "cpu_offload=true"], "choose one of them"),
        (["strategy=zero3", "compression=fp16"], "parallel.compression is an option of ddp"),
        (["strategy=pipeline", "bucket_mb=1"], "parallel.bucket_mb is an option of ddp"),
        (["strategy=ddp", "schedule=gpipe"], "parallel.schedule is an option of pipelines"),
        (["strategy=pipeline", "stages_per_rank=3"], "an option of interleaved, breadth-first"),
        (["strategy=pipeline", "schedule=zbv", "stages_per_rank=3"], "has two stages on each"),
        (["mesh=pipeline=2,shard=2", "schedule=zero-bubble"], "choose parallel.strategy=zero2"),
        (
            ["strategy=pipeline", "schedule=zero-bubble model.activation_checkpointing=blocks"],
            "computes them separately; choose parallel.schedule=interleaved",
        ),
        (
            ["strategy=zero3", "sequence_parallel=true"],
            "parallel.sequence_parallel is an option of tensor parallelism",
        ),
        (["strategy=tensor", "bucket_mb=1"], "parallel.bucket_mb is an option of ddp"),
        (["sync=diloco", "strategy=zero3"], "needs replicas that can train alone"),
        (["sync=diloco", "mesh=replicate=2,tensor=2"], "choose ddp, hsdp, or a mesh such as"),
        (["sync=diloco", "mesh=replicate=2,shard=2", "strategy=zero1"], "can train alone"),
        (["sync=diloco", "compression=bf16"], "parallel.compression is an option of ddp"),
        (["sync=local-sgd", "outer_lr=1"], "parallel.outer_lr is an option of diloco"),
        (["sync=step model.balance_loss=0.1"], "model.balance_loss is an option of experts"),
        (["sync_every=5"], "parallel.sync_every is an option of local-sgd and diloco"),
        (["sync=diloco model.sync_batchnorm=true"], "makes all replicas agree in every step"),
    ],
)
def test_contradictions_are_refused(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(" ".join(f"parallel.{word}" for word in words).split())
    assert expected in str(refusal.value)


def test_stages_are_balanced() -> None:
    from rollcall.train.parallel.layers import balance

    assert balance([1, 1, 1, 3], 2) == [0, 3, 4]
    assert balance([5, 1, 1, 1, 1], 3) == [0, 1, 3, 5]
    assert balance([1, 2], 1) == [0, 2]


def test_stages_lie_in_loops_or_forth_and_back() -> None:
    from rollcall.train.parallel.pipeline import owners

    assert owners("interleaved", 2, 3) == [0, 1, 0, 1, 0, 1]
    assert owners("zbv", 3, 2) == [0, 1, 2, 2, 1, 0]


def test_every_schedule_of_the_configuration_is_known() -> None:
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    from rollcall.config.checks import LOOPED
    from rollcall.train.parallel.pipeline import SCHEDULES

    annotation = Parallel.model_fields["schedule"].annotation
    names = typing.get_args(typing.get_args(annotation)[0])
    assert set(names) == set(SCHEDULES)
    several = [name for name in SCHEDULES if issubclass(SCHEDULES[name], PipelineScheduleMulti)]
    assert set(LOOPED) == set(several)


@pytest.mark.parametrize(
    ("schedule", "asked", "share", "ranks", "stages", "expected"),
    [
        ("1f1b", None, 50, 4, 4, 13),
        ("1f1b", None, 9, 4, 4, 2),  # three would make three micro-batches
        ("sequential", None, 50, 4, 4, 50),
        ("dualpipev", None, 50, 2, 4, 16),
        ("interleaved", 10, 50, 2, 4, "it needs a multiple of 2; choose data.micro_batch=9, or"),
        ("1f1b", 30, 50, 2, 3, "needs at least 3; choose data.micro_batch=24, or parallel.sched"),
        ("1f1b", None, 3, 4, 4, "it needs at least 4; choose parallel.schedule=gpipe"),
    ],
)
def test_micro_batches(
    schedule: str, asked: int | None, share: int, ranks: int, stages: int, expected: int | str
) -> None:
    from rollcall.train.parallel.pipeline import micro_batch

    options = parse(["parallel.strategy=pipeline", f"parallel.schedule={schedule}"])[1].parallel
    if isinstance(expected, int):
        assert micro_batch(options, asked, share, ranks, stages) == expected
        return
    with pytest.raises(ConfigError) as refusal:
        micro_batch(options, asked, share, ranks, stages)
    assert expected in str(refusal.value)


def test_layers_over_the_devices_of_one_process() -> None:
    """With the CPU as each of three devices."""
    import torch
    from torch import nn

    from rollcall.train.data.source import Batch
    from rollcall.train.parallel.devices import LayersPerGpu
    from rollcall.train.ranks.world import World

    act = nn.ReLU()  # it stands in two places
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), act, nn.Linear(8, 8), act)
    samples = torch.randn(4, 8)
    expected = model(samples)
    world = typing.cast("World", types.SimpleNamespace(device=torch.device("cpu"), is_main=True))
    part = LayersPerGpu(parse(["parallel.strategy=split"])[1], world, None)
    assert part.devices == [torch.device("cpu")]
    part.devices *= 3
    part.check(model, Batch(samples, samples, torch.ones(4)))
    part.apply(model)
    assert torch.equal(model(samples), expected)
    assert [[*held] for held in part._held] == [["0"], ["1", "2"], ["3", "4", "5", "6"]]
    assert not act._forward_hooks and not act._forward_pre_hooks
    assert model[5]._forward_hooks, "the outputs return to the first device"


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    from torch import nn

    from rollcall.train.parallel.layers import layers_of

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def pipeline_layers(self) -> dict[str, nn.Module]:
            return {"first": self.first, "second": self.second}

    model = Tied()
    assert list(layers_of(model)) == ["first", "second"]
    with pytest.raises(ConfigError, match="Linear cannot be divided into layers"):
        layers_of(model.first)
    model.second.weight = model.first.weight
    with pytest.raises(ConfigError, match="layers first and second share weights"):
        layers_of(model)
    model.third = nn.Linear(4, 4)
    model.second = nn.Linear(4, 4)
    with pytest.raises(
        ConfigError, match=r"no layer of pipeline_layers\(\) has the weight third.weight"
    ):
        layers_of(model)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({"2": "columns"}, "the model has no such layer"),
        ({"0": "halves"}, "tensor_plan has 0: halves, but expected columns or rows"),
        ({"1": "columns"}, "expected 1 to be an nn.Linear, got a LayerNorm"),
        (
            {"0": "columns"},
            "has 9 columns, which do not divide by tensor=2; choose 8 or 10",
        ),
    ],
)
def test_a_tensor_plan_that_does_not_fit_is_refused(plan: dict[str, str], expected: str) -> None:
    import torch
    from torch import nn

    from rollcall.train.data.source import Batch
    from rollcall.train.parallel.tensor import Tensor

    model = nn.Sequential(nn.Linear(4, 9), nn.LayerNorm(9))
    model.tensor_plan = plan  # type: ignore[assignment]
    mesh: typing.Any = types.SimpleNamespace(size=lambda: 2)
    part = Tensor(mesh, parse(["parallel.strategy=tensor", "model.name=my:net"])[1], 1)
    samples = torch.zeros(1, 4)
    with pytest.raises(ConfigError) as refusal:
        part.check(model, Batch(samples, samples, torch.ones(1)))
    assert expected in str(refusal.value)


@pytest.mark.parametrize(
    ("words", "degree", "tensor", "expected"),
    [
        (["model.name=mlp"], 2, 1, "model.name=mlp has no plan for context parallelism"),
        ([], 3, 1, "data.seq_len=16 does not divide by context=3; choose 15 or 18"),
        ([], 8, 1, "attention with 4 heads does not divide by context=8; choose model.num_heads=8"),
        ([], 4, 2, "by context=4 times tensor=2; choose model.num_heads=8"),
        ([], 4, 1, ""),  # two heads of keys and values for four ranks: they are repeated
    ],
)
def test_context_must_divide(words: list[str], degree: int, tensor: int, expected: str) -> None:
    import torch

    from rollcall.train import models
    from rollcall.train.data.source import Batch, Source
    from rollcall.train.parallel.context import Context

    config = parse(["parallel.strategy=context", "model.name=gpt", "model.hidden_size=32", *words])[
        1
    ]
    source: typing.Any = types.SimpleNamespace(shape=(16,), classes=5)
    model = models.build(config.model, typing.cast("Source", source))
    mesh: typing.Any = types.SimpleNamespace(
        get_group=lambda: None, get_local_rank=lambda: 0, size=lambda: degree
    )
    tokens = torch.zeros(2, 16, dtype=torch.long)
    part = Context(mesh, config, tensor)
    if not expected:
        part.check(model, Batch(tokens, tokens, torch.ones(2)))
        with pytest.raises(ConfigError, match="a target for each position"):
            part.check(model, Batch(tokens, tokens[:, 0], torch.ones(2)))
        return
    with pytest.raises(ConfigError) as refusal:
        part.check(model, Batch(tokens, tokens, torch.ones(2)))
    assert expected in str(refusal.value)


def test_columns_share_an_input_only_for_its_gradient(world: typing.Any) -> None:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    from rollcall.train.parallel.tensor import Tensor

    assert world.world_size == 1
    model = nn.ModuleList([nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)])
    model.tensor_plan = {"?": "columns"}  # type: ignore[assignment]
    part = Tensor(init_device_mesh("cpu", (1,)), parse(["parallel.strategy=tensor"])[1], 1)
    part._plan = model.tensor_plan
    part.apply(model)
    layers: list[typing.Any] = [*model]
    query, key = layers

    x = nn.Parameter(torch.ones(1, 3))
    with torch.inference_mode():
        query(x + 1)
    with torch.no_grad():
        query(x)
    with pytest.raises(MemoryError), part.around(last=True):
        (query(x) + key(x)).sum().backward()
        assert x.grad is not None
        expected = sum(layer.weight.full_tensor().sum(0, keepdim=True) for layer in layers)
        torch.testing.assert_close(x.grad, expected)
        raise MemoryError
    assert not part._input, "the activations of a failed pass are released"
