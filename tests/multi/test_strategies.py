"""Every strategy and composition trains the same model as one process, and resumes any other's.

Runs are shared: each of CONTRACT is made once, held to one process, and its checkpoint at step 4 is
what RESUMES start from.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ranks import FORKSERVER, TIMEOUT, Ranks, free_port
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._python_dispatch import TorchDispatchMode

from train import data, models, parallel
from train.config import parse
from train.data.order import validation_batches
from train.losses import per_sample_loss
from train.run import RunDir, read_lines
from train.world import World

# Eight steps of 50 samples, the last of 24: with four ranks two of them have nothing but padding.
# The norm of the gradient is above the clip at some steps and below at others.
WORDS = [
    "digits",
    "train.epochs=0.26",
    "train.evaluate_every=null",
    "optim.warmup_steps=0",
    "optim.clip_norm=0.2",
    "data.global_batch=50",
    "data.micro_batch=13",
    "checkpoint.every=4",
    "log.every=1",
]
STEPS, SAVED = 8, 4
TOLERANCE = 1e-6  # relative, of losses and the evaluation: fp32 sums in another order
NORM_TOLERANCE = 1e-5  # relative: late gradients follow from weights that differ by the next
WEIGHTS_TOLERANCE = 1e-5  # absolute, after eight AdamW updates of up to 3e-3 each


class Setup(NamedTuple):
    """A strategy on so many ranks."""

    world_size: int
    words: tuple[str, ...]
    node_size: int


def setup(world_size: int, *words: str, node_size: int | None = None) -> Setup:
    return Setup(world_size, tuple(f"parallel.{word}" for word in words), node_size or world_size)


CONTRACT = {
    "dp-1": setup(1, "strategy=dp"),
    "ddp-2": setup(2, "strategy=ddp", "static_graph=true"),
    "ddp-4": setup(4, "strategy=ddp", "bucket_mb=0.01"),
    "zero1-2": setup(2, "strategy=zero1"),
    "zero1-4": setup(4, "strategy=zero1"),
    "zero1-2x2": setup(4, "strategy=zero1", "mesh=replicate=2,shard=2"),
    "zero2-2": setup(2, "strategy=zero2"),
    "zero2-4": setup(4, "strategy=zero2"),
    "zero3-1": setup(1, "strategy=zero3"),
    "zero3-2": setup(2, "strategy=zero3"),
    "zero3-4": setup(4, "strategy=zero3"),
    "offload-2": setup(2, "strategy=zero3", "offload=true"),
    "hsdp-4": setup(4, "strategy=hsdp", node_size=2),
    "tensor-2": setup(2, "strategy=tensor"),
    "tensor-4": setup(4, "strategy=tensor"),
    "shard×tensor-4": setup(4, "mesh=shard=2,tensor=2"),
    "replicate×tensor-4": setup(4, "mesh=tensor=2,replicate=rest"),
    "pipeline-2": setup(2, "strategy=pipeline"),
    "pipeline-4": setup(4, "strategy=pipeline", "schedule=gpipe"),
    "pipeline×replicate-4": setup(4, "mesh=pipeline=2,replicate=2"),
    "pipeline×shard-4": setup(4, "mesh=pipeline=2,shard=2"),
    "pipeline×tensor-4": setup(4, "mesh=pipeline=2,tensor=2"),
}
TINY_GPT = (
    "train.steps=4",
    "data.name=text",
    "data.context=64",
    "model.name=gpt",
    "model.hidden=32",
    "model.layers=2",
)
WIDE = Setup(
    2, ("model.hidden=1024", "parallel.bucket_mb=0.5", "optim.name=sgd", "optim.lr=0.05"), 2
)
ON_FOUR = ("ddp-4", "zero1-4", "zero3-4", "hsdp-4", "tensor-4", "pipeline-4")
ON_TWO = ("ddp-2", "zero1-2", "zero3-2", "tensor-2", "pipeline-2")
RESUMES = [*product(ON_FOUR, ON_TWO), *product(ON_TWO, ["hsdp-4"])]


class Result(NamedTuple):
    """What a run leaves."""

    losses: list[float]
    norms: list[float]
    evaluation: list[float]
    run_dir: RunDir


def run(root: Path, chosen: Setup) -> Result:
    """Train, or continue what lies in the root."""
    words = [*WORDS, f"run.root={root}", "run.name=contract", *chosen.words]
    ranks = Ranks(
        chosen.world_size, words, root / "logs", {"LOCAL_WORLD_SIZE": str(chosen.node_size)}
    )
    codes = ranks.wait()
    assert codes == [0] * chosen.world_size, f"exit codes {codes}\n{ranks.output()}"
    run_dir = RunDir(root, "contract")
    lines = list(read_lines(run_dir.metrics))
    [evaluated] = [line for line in read_lines(run_dir.events) if line["event"] == "evaluated"]
    return Result(
        [line["loss"] for line in lines],
        [line["grad_norm"] for line in lines],
        [evaluated["loss"], evaluated["accuracy"]],
        run_dir,
    )


def weights(result: Result) -> dict[str, torch.Tensor]:
    whole = result.run_dir.path / "weights.pt"
    dcp_to_torch_save(max(result.run_dir.checkpoints.iterdir()), whole)
    model: dict[str, torch.Tensor] = torch.load(whole)["model"]
    return model


def assert_equal(result: Result, expected: Result) -> None:
    assert result.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert result.norms == pytest.approx(expected.norms, rel=NORM_TOLERANCE)
    assert result.evaluation == pytest.approx(expected.evaluation, rel=TOLERANCE)
    found, expected_weights = weights(result), weights(expected)
    assert found.keys() == expected_weights.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected_weights[key], rtol=0, atol=WEIGHTS_TOLERANCE)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    result = run(tmp_path_factory.mktemp("alone"), setup(1, "strategy=single"))
    assert len(result.losses) == STEPS
    assert min(result.norms) < 0.2 < max(result.norms)
    return result


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """The run of this name in CONTRACT, made when it is first asked for."""
    return cache(lambda name: run(tmp_path_factory.mktemp("made"), CONTRACT[name]))


@pytest.fixture(scope="module")
def gpt_alone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("gpt"), Setup(1, TINY_GPT, 1))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("wide"), WIDE)


@pytest.mark.parametrize("name", CONTRACT)
def test_strategy_equals_one_process(
    name: str, alone: Result, made: Callable[[str], Result]
) -> None:
    assert_equal(made(name), alone)


@pytest.mark.parametrize("name", ["zero2-2", "shard×tensor-4", "pipeline×tensor-4"])
def test_transformer_equals_one_process(name: str, gpt_alone: Result, tmp_path: Path) -> None:
    chosen = CONTRACT[name]
    result = run(tmp_path, chosen._replace(words=(*TINY_GPT, *chosen.words)))
    assert_equal(result, gpt_alone)


@pytest.mark.parametrize(("source", "target"), RESUMES)
def test_any_strategy_resumes_any_other(
    source: str,
    target: str,
    alone: Result,
    made: Callable[[str], Result],
    tmp_path: Path,
) -> None:
    saved = made(source).run_dir.checkpoints / f"step-{SAVED:08d}"
    shutil.copytree(saved, RunDir(tmp_path, "contract").checkpoints / saved.name)
    result = run(tmp_path, CONTRACT[target])
    assert result.losses == pytest.approx(alone.losses[SAVED:], rel=TOLERANCE)
    assert result.evaluation == pytest.approx(alone.evaluation, rel=TOLERANCE)


@pytest.mark.parametrize("name", ["zero1-4", "hsdp-4", "shard×tensor-4"])
def test_the_same_mesh_resumes_to_the_last_bit(
    name: str, made: Callable[[str], Result], tmp_path: Path
) -> None:
    """What test_resume.py shows for ddp."""
    whole = made(name)
    saved = whole.run_dir.checkpoints / f"step-{SAVED:08d}"
    shutil.copytree(saved, RunDir(tmp_path, "contract").checkpoints / saved.name)
    result = run(tmp_path, CONTRACT[name])
    assert result.losses == whole.losses[SAVED:]
    assert result.evaluation == whole.evaluation


@pytest.mark.parametrize(
    ("compression", "tolerance"),
    [
        ("fp16", 1e-5),  # relative: gradients of 11 bits
        ("bf16", 1e-4),  # of 8 bits
        ("powersgd", 2e-2),  # matrices of rank 2 in their place; what is lost comes a step later
    ],
)
def test_compression_stays_close(
    compression: str, tolerance: float, wide: Result, tmp_path: Path
) -> None:
    """Several buckets, which PowerSGD must send in the same order on every rank."""
    words = (*WIDE.words, f"parallel.compression={compression}")
    result = run(tmp_path, WIDE._replace(words=words))
    assert result.losses != wide.losses
    assert result.losses == pytest.approx(wide.losses, rel=tolerance)


def test_a_mesh_that_does_not_fit_starts_nothing(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    words = [*WORDS, f"run.root={root}", "parallel.mesh=replicate=2,shard=2"]
    ranks = Ranks(2, words, tmp_path)
    assert ranks.wait() == [2, 2]
    assert ranks.output() == (
        "rollcall: error: parallel.mesh=replicate=2,shard=2 needs 4 ranks, but 2 were started; "
        "the nearest mesh for 2 ranks is replicate=1,shard=2\n"
    )
    assert not root.exists()


def test_accumulation_sends_gradients_once(tmp_path: Path) -> None:
    """Three micro-batches cost what one does, but for weights that zero3 may not keep."""
    port = free_port()
    counts = [tmp_path / f"rank-{rank}.json" for rank in range(2)]
    ranks = [
        FORKSERVER.Process(target=_count_collectives, args=(rank, port, counts[rank]))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(TIMEOUT)
        rank.kill()
    for file in counts:
        for strategy, (one, three) in json.loads(file.read_text()).items():
            gathers = [counted.pop("_allgather_base_", 0) for counted in (one, three)]
            assert one and three == one, strategy
            assert gathers[1] == gathers[0] * (3 if strategy == "zero3" else 1), strategy


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts them by name. (CommDebugMode of torch 2.11 fails under DDP.)"""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _count_collectives(rank: int, port: int, file: Path) -> None:
    place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    world = World.join("cpu")
    counts: dict[str, list[dict[str, int]]] = {}
    for name in ("ddp", "zero1", "zero2", "zero3", "hsdp"):
        config = parse([f"parallel.strategy={name}"])[1]
        source = data.load(config.data, world)
        batch = next(validation_batches(source, 4, world.rank, world.world_size))
        strategy = parallel.build(config, world, per_sample_loss)
        strategy.place(models.build(config.model, source), batch)
        counts[name] = []
        for micro_batches in ([batch], [batch] * 3):
            with Collectives() as collectives:
                strategy.forward_backward(micro_batches, 8)
            counts[name].append(collectives.counts)
    file.write_text(json.dumps(counts))
    world.leave()
