"""`rollcall plan` says of any number of ranks what real and imaginary ranks do."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import planned_traffic as traffic
import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from ranks import alone, together, train
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop,
    sdpa_flop,
)

from rollcall.config import Config, parse
from rollcall.tools.plan import own_model as plan_model
from rollcall.tools.plan.layout import Layout
from rollcall.tools.plan.model import Model
from rollcall.train import models
from rollcall.train.data import sets
from rollcall.train.data.order import validation_batches
from rollcall.train.numerics import losses
from rollcall.train.parallel.shard import units
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.world import Place, World

WORDS = ["digits", "data.global_batch=512", "train.steps=1", "data.micro_batch=16"]


def plan(folder: Path, *words: str) -> tuple[int | None, str]:
    """Return the exit code and the output of `python -m train plan`."""
    process = alone(["plan", *words], folder / "plan")
    process.join(500)
    return process.exitcode, (folder / "plan").read_text()


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_the_plan_is_what_the_ranks_say(strategy: str, tmp_path: Path) -> None:
    words = [*WORDS, f"parallel.strategy={strategy}"]
    code, planned = plan(tmp_path, "--ranks=4", *words)
    assert code == 0, planned
    first, said = planned.splitlines()
    assert "1 steps of 512 samples" in first and "128 samples a step on each rank, in 8" in first
    output = train(4, [*words, f"run.root={tmp_path}", "run.name=real"], tmp_path / "logs")
    assert f"rollcall: {said}\n" in output


def test_a_thousand_ranks_are_refused_as_there(tmp_path: Path) -> None:
    code, refused = plan(tmp_path, "--ranks=1024", "--node-size=8", *WORDS)
    expected = "data.global_batch=512: expected at least 1024, one sample for each share of"
    assert (code, expected in refused) == (2, True), refused


KINDS = {
    "all-reduce": ("allreduce_", "all_reduce"),
    "all-gather": ("_allgather_base_", "all_gather_into_tensor", "all_gather"),
    "all-to-all": ("alltoall_base_", "all_to_all_single"),
    "reduce-scatter": ("_reduce_scatter_base_", "reduce_scatter_tensor"),
}


class Sent(Collectives):  # type: ignore[no-untyped-call]
    """Counts also what DTensors send."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional":
            self.bytes[func.overloadpacket.__name__] += args[0].nbytes
        if func.overloadpacket.__name__ == "allgather_":  # into a list of tensors
            self.bytes["all_gather"] += sum(tensor.nbytes for tensor in tree_leaves(args[0]))
        return super().__torch_dispatch__(func, types, args, kwargs)


STRATEGIES: dict[str, dict[str, Any]] = {
    "parallel.strategy=ddp": {},
    "parallel.strategy=zero1": {"zero": 1},
    "parallel.strategy=zero2": {"zero": 2},
    "parallel.strategy=zero3": {"zero": 3},
    "parallel.strategy=zero3 precision=bf16": {"zero": 3, "precision": "bf16"},
    "parallel.mesh=shard=2,context=2": {"zero": 3, "data": 2, "context": 2},
    "parallel.strategy=hsdp": {"zero": 3, "shard": 2},
    "parallel.strategy=tensor": {"data": 1, "tensor": 4, "sequence": False},
}
VISION = ("parallel.strategy=ddp", "parallel.strategy=zero3")
MODELS = {
    "gpt": (
        "gpt",
        "data.seq_len=16",
        "model.hidden_size=32",
        "model.num_layers=2",
        "model.num_kv_heads=4",
    ),
    # FSDP pads what does not divide: eight classes on four ranks do.
    "vision": (
        "model.name=shufflenet_v2_x0_5",
        "data.name=synthetic_images",
        "data.image_size=32",
        "data.num_classes=8",
    ),
}
ATEN = torch.ops.aten
ATTENTION = {
    ATEN._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}


@pytest.mark.long
def test_bytes_and_flops_are_those_of_real_ranks(tmp_path: Path) -> None:
    """Four gloo ranks count what a step sends and computes; the planner's closed forms say it."""
    together(4, _count, tmp_path, per_node=2)
    for file in tmp_path.glob("rank-*.json"):
        found = json.loads(file.read_text())
        assert len(found) == len(STRATEGIES) + len(VISION)
        for name, (counted, planned) in found.items():
            assert counted == planned, name


def _count(rank: int, folder: Path) -> None:
    world = World.join("cpu")
    # torch 2.11 does not count the fused attention of CPUs.
    flop_registry.update(ATTENTION | flop_registry)
    found = {}
    for kind, words in MODELS.items():
        for strategy, degrees in STRATEGIES.items():
            if kind == "vision" and strategy not in VISION:
                continue
            config = parse([*words, *strategy.split(), "data.global_batch=16"])[1]
            found[f"{kind} {strategy}"] = _step(config, world, degrees)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    world.leave()


def _step(config: Config, world: World, degrees: Any) -> list[Any]:
    """Count two micro-batches of two rows, and return what the planner says of them."""
    source = sets.load(config.data, world)
    batch = next(validation_batches(source, 2, 0, 1))
    strategy = Strategy(config, world, losses.Objective(losses.of(config)))
    strategy.place(models.build(config.model, source), batch)
    strategy.warm_up(batch)
    with Sent() as sent, FlopCounterMode(display=False) as flops:
        strategy.forward_backward([batch] * 2, 16)
    planned = plan_model.describe(config)
    layout = Layout(
        **{"data": 4, "precision": "fp32", **degrees}, micro=2, batch=4 * degrees.get("data", 4)
    )
    counted = _counted(sent)
    computed = flops.get_total_flops() * (1 if layout.tensor == 1 else 0)
    planned_flops = planned.flops() * 4 / layout.context * (1 if layout.tensor == 1 else 0)
    expected = _planned(planned, layout)
    if layout.zero == 3 and not planned.last.cut_weights:  # of images: the model knows the last one
        values = sum(weight.numel() for weight in [*units(strategy.model)][-1].parameters())
        expected["all-gather"] -= 2 * layout.width * values
    return [[counted, computed], [expected, round(planned_flops)]]


def _planned(model: Model, layout: Layout) -> dict[str, float]:
    found = defaultdict[str, float](float)
    parts = traffic.Sized.of(model)
    passes = traffic.of_passes(parts, [range(len(parts))], layout)
    for (kind, *_), (_, size) in passes.items():
        found[kind] += size
    return found


def _counted(sent: Sent) -> dict[str, int]:
    sizes = {name: sum(sent.bytes[kind] for kind in kinds) for name, kinds in KINDS.items()}
    return {name: size for name, size in sizes.items() if size}


MANY: dict[
    str, dict[str, Any]
] = {  # DDP waits for its all-reduces, which this group does not answer
    "parallel.strategy=zero2": {"zero": 2},
    "parallel.strategy=zero3": {"zero": 3},
    "parallel.strategy=hsdp": {"zero": 3, "shard": 8},
    "parallel.strategy=zero3 precision=bf16": {"zero": 3, "precision": "bf16"},
}


@pytest.mark.parametrize("ranks", [16, 512])
def test_bytes_are_those_of_imaginary_ranks(ranks: int) -> None:
    """Rank 0 of a large world trains with torch's fake process group, which sends nothing."""
    words = [
        "gpt",
        "data.name=synthetic_tokens",
        "data.seq_len=8",
        "data.num_classes=512",
        "data.global_batch=1024",
    ]
    words += ["model.hidden_size=512", "model.num_layers=1", "model.num_heads=8"]
    words += ["model.num_kv_heads=8"]  # FSDP pads what does not divide by the ranks
    for strategy, degrees in MANY.items():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        try:
            config = parse([*words, *strategy.split()])[1]
            world = World(Place("plan", world_size=ranks, local_world_size=8), torch.device("cpu"))
            source = sets.load(config.data, world)
            batch = next(validation_batches(source, 1, 0, 1))
            trained = Strategy(config, world, losses.Objective(losses.of(config)))
            trained.place(models.build(config.model, source), batch)
            trained.warm_up(batch)
            with Sent() as sent:
                trained.forward_backward([batch] * 2, 2 * ranks)
            layout = Layout(**{"data": ranks, "precision": "fp32", **degrees}, batch=2 * ranks)
            assert _counted(sent) == _planned(plan_model.describe(config), layout), strategy
        finally:
            dist.destroy_process_group()
