"""Every strategy and composition trains the same model as one process, and resumes any other's.

All runs of one number of ranks are done by one group of them (`train.proof.matrix.run`), in one go.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ranks import FORKSERVER, TIMEOUT, Ranks, free_port
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from train import data, losses, models, parallel
from train.checkpoint import export
from train.config import parse
from train.data.order import validation_batches
from train.parallel.schedules import SCHEDULES
from train.parallel.strategy import Composed
from train.proof import matrix
from train.proof.matrix import Job
from train.run import RunDir, read_lines
from train.world import World

# Eight steps of 50 samples, the last of 24: with four ranks two of them have nothing but padding.
# The norm of the gradient is above the clip at some steps and below at others.
DIGITS = (
    *(word for word in matrix.WORDS if not word.startswith("train.steps")),
    "train.epochs=0.26",
)
STEPS, SAVED = 8, 4
TOLERANCE = 1e-6  # relative, of losses and the evaluation: fp32 sums in another order
NORM_TOLERANCE = 1e-5  # relative: late gradients follow from weights that differ by the next
GRADIENT_TOLERANCE = 2e-6  # of each tensor, relative to its norm: the first step, before the clip
WEIGHTS_TOLERANCE = 1e-5  # absolute, after AdamW updates of up to 3e-3 each
# Four steps of 16 sequences of 64 bytes. Eight layers: two on each of four ranks.
TEXT = (
    *matrix.WORDS,
    "train.steps=4",
    "data.name=text",
    "data.context=64",
    "data.global_batch=16",
    "data.micro_batch=4",
    "model.name=gpt",
    "model.hidden=32",
    "model.layers=5",
    "optim.lr=1e-3",
)
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "parallel.md"


class Setup(NamedTuple):
    """A strategy on so many ranks."""

    world_size: int
    words: tuple[str, ...]

    @property
    def schedule(self) -> str:
        """Its pipeline schedule."""
        return parse(self.words)[1].parallel.schedule_name


def setup(world_size: int, *words: str) -> Setup:
    return Setup(world_size, tuple(f"parallel.{word}" for word in words))


ON_DIGITS = {
    "dp-1": setup(1, "strategy=dp"),
    "zero3-1": setup(1, "strategy=zero3"),
    "split-1": setup(1, "strategy=split"),
    "ddp-2": setup(2, "strategy=ddp", "static_graph=true"),
    "ddp-4": setup(4, "strategy=ddp", "bucket_mb=0.01"),
    "zero1-2": setup(2, "strategy=zero1"),
    "zero1-4": setup(4, "strategy=zero1"),
    "zero1-2x2": setup(4, "strategy=zero1", "mesh=replicate=2,shard=2"),
    "zero2-2": setup(2, "strategy=zero2"),
    "zero2-4": setup(4, "strategy=zero2"),
    "zero3-2": setup(2, "strategy=zero3"),
    "zero3-4": setup(4, "strategy=zero3"),
    "offload-2": setup(2, "strategy=zero3", "offload=true"),
    "hsdp-4": setup(4, "strategy=hsdp"),
    "tensor-2": setup(2, "strategy=tensor"),
    "tensor-4": setup(4, "strategy=tensor"),
    "replicate×tensor-4": setup(4, "mesh=tensor=2,replicate=rest"),
    "split-2": setup(2, "strategy=split", "balance=time"),
    "split-4": setup(4, "strategy=split"),
    "split×replicate-4": setup(4, "strategy=split", "mesh=pipeline=2,replicate=2"),
    "pipeline-2": setup(2, "strategy=pipeline"),
    "pipeline-4": setup(4, "strategy=pipeline"),
    "gpipe-4": setup(4, "strategy=pipeline", "schedule=gpipe"),
    "interleaved-2": setup(2, "strategy=pipeline", "schedule=interleaved"),
    "breadth-first-2": setup(2, "strategy=pipeline", "schedule=breadth-first"),
    "zero-bubble-2": setup(2, "strategy=pipeline", "schedule=zero-bubble"),
    "zbv-2": setup(2, "strategy=pipeline", "schedule=zbv"),
    "dualpipev-2": setup(2, "strategy=pipeline", "schedule=dualpipev"),
    "pipeline×replicate-4": setup(4, "mesh=pipeline=2,replicate=2"),
    "pipeline×shard-4": setup(4, "mesh=pipeline=2,shard=2"),
    "zero-bubble×shard-4": setup(
        4, "strategy=zero2", "mesh=pipeline=2,shard=2", "schedule=zero-bubble"
    ),
}
ON_TEXT = {
    "zero2-2": setup(2, "strategy=zero2"),
    "sequence-2": setup(2, "strategy=tensor", "sequence=true"),
    "context-2": setup(2, "strategy=context"),
    "context-4": setup(4, "strategy=context"),
    "shard×tensor-4": setup(4, "mesh=shard=2,tensor=2"),
    "shard×sequence-4": setup(4, "mesh=shard=2,tensor=2", "sequence=true"),
    "replicate×context-4": setup(4, "mesh=replicate=2,context=2"),
    "zero1×context-4": setup(4, "strategy=zero1", "mesh=shard=2,context=2"),
    "shard×context-4": setup(4, "mesh=shard=2,context=2"),
    "context×sequence-4": setup(4, "mesh=context=2,tensor=2", "sequence=true"),
    "pipeline×context-4": setup(4, "mesh=pipeline=2,context=2"),
    "pipeline×sequence-4": setup(4, "mesh=pipeline=2,tensor=2", "sequence=true"),
    "interleaved-4": setup(4, "strategy=pipeline", "schedule=interleaved"),
    "zbv-4": setup(4, "strategy=pipeline", "schedule=zbv"),
    "pipeline×shard×tensor-8": setup(8, "mesh=pipeline=2,shard=2,tensor=2"),
}
AGAIN = "model.activation_checkpointing=blocks"
for name in ("sequence-2", "context-2", "context×sequence-4"):
    ON_TEXT[f"{name}-again"] = ON_TEXT[name]._replace(words=(*ON_TEXT[name].words, AGAIN))
CONTRACT = {"digits": (DIGITS, ON_DIGITS), "text": (TEXT, ON_TEXT)}
CELLS = [(model, name) for model, (_, setups) in CONTRACT.items() for name in setups]
ALONE = setup(1, "strategy=single")
WIDE = (*DIGITS, "model.hidden=1024", "parallel.bucket_mb=0.5", "optim.name=sgd", "optim.lr=0.05")
COMPRESSIONS = {
    "none": 0.0,
    "fp16": 1e-5,  # relative, of losses: gradients of 11 bits
    "bf16": 1e-4,  # of 8 bits
    "powersgd": 2e-2,  # matrices of rank 2 in their place; what is lost comes a step later
}


class Result(NamedTuple):
    """What a run leaves."""

    losses: list[float]
    norms: list[float]
    evaluation: list[float]
    run_dir: RunDir
    gradients: list[Path]

    @classmethod
    def read(cls, job: Job) -> Result:
        lines = list(read_lines(job.run_dir.metrics))
        [evaluated] = [line for line in read_lines(job.run_dir.events) if "accuracy" in line]
        return cls(
            [line["loss"] for line in lines],
            [line["grad_norm"] for line in lines],
            [evaluated["loss"], evaluated["accuracy"]],
            job.run_dir,
            sorted(job.root.glob("gradients-*.pt")),
        )

    def weights(self) -> dict[str, torch.Tensor]:
        newest = max(self.run_dir.checkpoints.iterdir())
        model: dict[str, torch.Tensor] = export.read(newest)["model"]
        return model


Made = Callable[[str, str], Result]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The result of a setup of CONTRACT; the first demand makes all of as many ranks."""

    @cache
    def group(world_size: int) -> dict[tuple[str, str], Result]:
        root = tmp_path_factory.mktemp(f"on-{world_size}")
        jobs = {
            (model, name): Job(root / f"{model}-{name}", [*words, *chosen.words])
            for model, (words, setups) in CONTRACT.items()
            for name, chosen in {"alone": ALONE, **setups}.items()
            if chosen.world_size == world_size and _runs_here(chosen)
        }
        record = partial(_record_gradients, [job.root for job in jobs.values()])
        matrix.run(list(jobs.values()), root / "logs", world_size, min(world_size, 2), record)
        return {key: Result.read(job) for key, job in jobs.items()}

    return lambda model, name: group({"alone": ALONE, **CONTRACT[model][1]}[name].world_size)[
        model, name
    ]


def _runs_here(chosen: Setup) -> bool:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return version >= SCHEDULES[chosen.schedule].since


def _record_gradients(roots: list[Path]) -> None:
    """Let every rank write the whole gradients it has part in at the first clip of each run."""
    clip, pending = Composed.clip, iter(roots)
    seen: list[Composed] = []

    def clip_and_record(strategy: Composed, *args: Any, **kwargs: Any) -> torch.Tensor:
        if strategy not in seen:
            seen.append(strategy)
            found: dict[str, Any] = {
                name: weight.grad for name, weight in strategy.model.named_parameters()
            }
            for name, gradient in found.items():
                whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                found[name] = whole.clone()
            file = next(pending) / f"gradients-{strategy.world.rank}.pt"
            file.parent.mkdir(exist_ok=True)
            torch.save(found, file)
        return clip(strategy, *args, **kwargs)

    setattr(Composed, "clip", clip_and_record)  # noqa: B010


@pytest.mark.timeout(900)  # the first one makes all of as many ranks
@pytest.mark.parametrize(("model", "name"), CELLS)
def test_strategy_equals_one_process(model: str, name: str, made: Made) -> None:
    chosen = CONTRACT[model][1][name]
    if not _runs_here(chosen):
        pytest.skip(f"{chosen.schedule} needs torch {SCHEDULES[chosen.schedule].since}")
    result, expected = made(model, name), made(model, "alone")
    assert len(expected.losses) == (STEPS if model == "digits" else 4)
    assert min(expected.norms) < 0.2 < max(expected.norms) or model == "text"
    assert result.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert result.norms == pytest.approx(expected.norms, rel=NORM_TOLERANCE)
    assert result.evaluation == pytest.approx(expected.evaluation, rel=TOLERANCE)
    gradients = torch.load(expected.gradients[0])
    assert len(result.gradients) == chosen.world_size
    recorded = [torch.load(file) for file in result.gradients]
    assert set().union(*recorded) == set(gradients)
    for rank, found in enumerate(recorded):
        for key, gradient in found.items():
            error = (gradient - gradients[key]).norm() / gradients[key].norm()
            assert error < GRADIENT_TOLERANCE, f"{key} on rank {rank}"
    found, expected_weights = result.weights(), expected.weights()
    assert found.keys() == expected_weights.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected_weights[key], rtol=0, atol=WEIGHTS_TOLERANCE)


@pytest.mark.timeout(900)
def test_any_strategy_resumes_any_other(tmp_path: Path) -> None:
    """And the matrix in the docs is what the command prints, but for the noise of its numbers."""
    cells = matrix.measure(tmp_path)
    assert len(cells) == len(matrix.STRATEGIES) ** 2
    assert max(cells.values()) <= matrix.TOLERANCE, matrix.table(cells)
    number = re.compile(r"\d\.\de[+-]\d\d")
    assert number.sub("#", matrix.table(cells)) in number.sub("#", DOCS.read_text())


def test_the_same_mesh_resumes_to_the_last_bit(made: Made, tmp_path: Path) -> None:
    """What test_resume.py shows for ddp."""
    jobs = {}
    for name in ("zero1-4", "hsdp-4", "pipeline-4"):
        saved = made("digits", name).run_dir.checkpoints / f"step-{SAVED:08d}"
        jobs[name] = Job(tmp_path / name, [*DIGITS, *ON_DIGITS[name].words])
        shutil.copytree(saved, jobs[name].run_dir.checkpoints / saved.name)
    matrix.run(list(jobs.values()), tmp_path / "logs", 4, 2)
    for name, job in jobs.items():
        whole, result = made("digits", name), Result.read(job)
        assert result.losses == whole.losses[SAVED:], name
        assert result.evaluation == whole.evaluation, name


def test_compression_stays_close(tmp_path: Path) -> None:
    """Several buckets, which PowerSGD must send in the same order on every rank."""
    jobs = {
        name: Job(tmp_path / name, [*WIDE, f"parallel.compression={name}"]) for name in COMPRESSIONS
    }
    matrix.run(list(jobs.values()), tmp_path / "logs", 2)
    plain = Result.read(jobs.pop("none")).losses
    for name, job in jobs.items():
        found = Result.read(job).losses
        assert found != plain, name
        assert found == pytest.approx(plain, rel=COMPRESSIONS[name]), name


def test_the_documented_model_equals_one_process(tmp_path: Path) -> None:
    """The example of docs/parallel.md, whose plans it brings itself."""
    [source] = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (tmp_path / "my_model.py").write_text(source)
    jobs = {
        strategy: Job(
            tmp_path / strategy,
            [*TEXT, "model.name=my_model:Net", "model.layers=2", f"parallel.strategy={strategy}"],
        )
        for strategy in ("single", "pipeline", "split", "tensor", "context")
    }
    importable = partial(_import_from, tmp_path)
    alone = jobs.pop("single")
    matrix.run([alone], tmp_path / "logs-1", 1, prepare=importable)
    matrix.run(list(jobs.values()), tmp_path / "logs-2", 2, prepare=importable)
    for strategy, job in jobs.items():
        assert job.losses() == pytest.approx(alone.losses(), rel=TOLERANCE), strategy


def _import_from(directory: Path) -> None:
    sys.path.insert(0, str(directory))


def test_a_strategy_is_one_file_and_one_line(made: Made, tmp_path: Path) -> None:
    """The example of CONTRIBUTING.md, in a copy of the package."""
    shutil.copytree(ROOT / "train", tmp_path / "train")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    file, line = blocks
    (tmp_path / "train/parallel/by_hand.py").write_text(file)
    mesh = tmp_path / "train/parallel/mesh.py"
    mesh.write_text(mesh.read_text().replace("PRESETS = {\n", f"PRESETS = {{\n{line}"))
    job = Job(tmp_path / "by-hand", [*DIGITS, "parallel.strategy=by-hand"])
    words = [*job.words, f"run.root={job.root}", "run.name=run"]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "train", *words],
            cwd=tmp_path,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    output = [rank.communicate(timeout=TIMEOUT)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], output
    assert "Per step 8 all-reduces of gradients." in output[0]
    expected = made("digits", "alone")
    assert Result.read(job).losses == pytest.approx(expected.losses, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["parallel.mesh=replicate=2,shard=2"],
            "parallel.mesh=replicate=2,shard=2 needs 4 ranks, but 2 were started; "
            "the nearest mesh for 2 ranks is replicate=1,shard=2",
        ),
        (
            ["parallel.strategy=pipeline", "parallel.schedule=interleaved", "model.name=mlp"],
            "pipeline=2 with 2 stages on each rank makes 4 stages, which is more than the 2 layers "
            "with weights of this model: choose at most pipeline=1",
        ),
        (
            ["parallel.strategy=pipeline", "data.micro_batch=50"],
            "50 samples in micro-batches of data.micro_batch=50 are 1, which "
            "parallel.schedule=1f1b cannot run over 2 stages on 2 ranks: it needs at least 2; "
            "choose data.micro_batch=49, or parallel.schedule=gpipe",
        ),
    ],
)
def test_what_does_not_fit_starts_nothing(words: list[str], message: str, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    ranks = Ranks(2, [*DIGITS, f"run.root={root}", *words], tmp_path)
    assert ranks.wait() == [2, 2]
    assert ranks.output().startswith(f"rollcall: error: {message}")
    assert ranks.output().count("\n") == 1
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
        strategy = parallel.build(config, world, losses.per_sample_loss)
        strategy.place(models.build(config.model, source), batch)
        strategy.settle(batch)
        counts[name] = []
        for micro_batches in ([batch], [batch] * 3):
            with Collectives() as collectives:
                strategy.forward_backward(micro_batches, 8)
            counts[name].append(collectives.counts)
    file.write_text(json.dumps(counts))
    world.leave()
