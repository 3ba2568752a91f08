"""Every strategy and composition trains the same model as one process, and resumes any other's.

One group of ranks does all runs of its size in one go (`rollcall.tools.bench.rank_jobs.run`).
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import strategy_matrix
import torch
import traffic
import user_code
from _pytest.mark import ParameterSet
from checkout import ROOT, SHORT_TEXT
from collectives import Collectives
from ranks import TIMEOUT, Ranks, leave_out_operations, logged_steps, together
from torch.distributed.tensor import DTensor

from rollcall.config import parse
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.system.hosts import free_port
from rollcall.tools.bench import rank_jobs
from rollcall.tools.bench.rank_jobs import Job
from rollcall.train import models
from rollcall.train.checkpoint.tools import export
from rollcall.train.data import sets
from rollcall.train.data.order import validation_batches
from rollcall.train.numerics import losses
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.world import World

# Eight steps of 50 samples, the last of 24: with four ranks two of them have nothing but padding.
# The norm of the gradient is above the clip at some steps and below at others.
DIGITS = (
    *(word for word in rank_jobs.WORDS if not word.startswith("train.steps")),
    "train.epochs=0.26",
)
STEPS, SAVED = 8, 4
TOLERANCE = 1e-6  # relative, of losses and the evaluation: fp32 sums in another order
NORM_TOLERANCE = 1e-5  # relative: late gradients follow from weights that differ by the next
# Of each tensor in the first step, before the clip, relative to its norm. A gradient is a sum of
# up to 3,200 terms: 50 images of 64 pixels. Added in another order in fp32, a sum of n terms
# differs by about sqrt(n) * 2^-24 of its size.
GRADIENT_TOLERANCE = 3200**0.5 * 2**-24
# Absolute. Gradients of about 1e-3 differ by 2^-22 of that, as measured. AdamW divides a gradient
# by its own size plus 1e-8, so where it is nearly zero the update differs by a fraction of
# 2^-22 * 1e-3 / 1e-8 = 0.024. An update is at most 3e-3.
WEIGHTS_TOLERANCE = 0.024 * 3e-3
# Four steps of 16 sequences of 64 bytes. ODD below has the pipelines of such a model. More layers
# would only be dispatched more often, which is what these runs cost.
TEXT = (
    *rank_jobs.WORDS,
    "train.steps=4",
    "data.name=text",
    SHORT_TEXT,
    "data.seq_len=64",
    "data.global_batch=16",
    "data.micro_batch=4",
    "model.name=gpt",
    "model.hidden_size=32",
    "model.num_layers=2",
    "optim.lr=1e-3",
)
DOCS = ROOT / "docs" / "parallelism.md"
NUMBER = re.compile(r"\d\.\de[+-]\d\d")


class Setup(NamedTuple):
    """A strategy on so many ranks."""

    world_size: int
    words: tuple[str, ...]


def setup(world_size: int, *words: str) -> Setup:
    return Setup(world_size, tuple(f"parallel.{word}" for word in words))


ON_DIGITS = {
    "dp-1": setup(1, "strategy=dp"),
    "zero3-1": setup(1, "strategy=zero3"),
    "split-1": setup(1, "strategy=split"),
    "ddp-2": setup(2, "strategy=ddp"),
    "ddp-4": setup(4, "strategy=ddp", "bucket_mb=0.01"),
    "zero1-2": setup(2, "strategy=zero1"),
    "zero1-4": setup(4, "strategy=zero1"),
    "zero1-2x2": setup(4, "strategy=zero1", "mesh=replicate=2,shard=2"),
    "zero2-2": setup(2, "strategy=zero2"),
    "zero2-4": setup(4, "strategy=zero2"),
    "zero3-2": setup(2, "strategy=zero3"),
    "zero3-4": setup(4, "strategy=zero3"),
    "offload-2": setup(2, "strategy=zero3", "cpu_offload=true"),
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
    "sequence-2": setup(2, "strategy=tensor", "sequence_parallel=true"),
    "context-2": setup(2, "strategy=context"),
    "context-4": setup(4, "strategy=context"),
    "shard×tensor-4": setup(4, "mesh=shard=2,tensor=2"),
    "shard×sequence-4": setup(4, "mesh=shard=2,tensor=2", "sequence_parallel=true"),
    "replicate×context-4": setup(4, "mesh=replicate=2,context=2"),
    "zero1×context-4": setup(4, "strategy=zero1", "mesh=shard=2,context=2"),
    "shard×context-4": setup(4, "mesh=shard=2,context=2"),
    "context×sequence-4": setup(4, "mesh=context=2,tensor=2", "sequence_parallel=true"),
    "pipeline×shard×tensor-8": setup(8, "mesh=pipeline=2,shard=2,tensor=2"),
}
# Models with the habits of Hugging Face's, which make their own position ids.
OWN = (*TEXT, "model.name=user_code:asked_positions")
ON_OWN = {
    "context-2": setup(2, "strategy=context"),
    "tensor-2": setup(2, "strategy=tensor"),
    "zero3-2": setup(2, "strategy=zero3"),
    "context×tensor-4": setup(4, "mesh=context=2,tensor=2"),
}
AGAIN = "model.activation_checkpointing=blocks"
for name in ("sequence-2", "context-2", "context×sequence-4"):
    ON_TEXT[f"{name}-again"] = ON_TEXT[name]._replace(words=(*ON_TEXT[name].words, AGAIN))
SELECTIVE = "model.activation_checkpointing=selective"
ON_TEXT["context-2-selective"] = Setup(2, (*ON_TEXT["context-2"].words, SELECTIVE))
# The same with targets that do not count, and weights that are unused, frozen and shared. No
# pipeline can divide a model whose head has the weights of the embedding.
ODD = (
    *(*TEXT, "model.num_layers=3", "checkpoint.every=2"),
    *("data.name=user_code:gaps", "model.name=user_code:odd"),
)
TIED = (*ODD, "model.name=user_code:tied")
# Experts that get few tokens or none on a rank, and biases that move.
EXPERTS = (
    *(*TEXT, "checkpoint.every=2", "model.experts=4", "model.expert_size=24"),
    *("model.shared_experts=1", "model.balance_rate=0.05"),
)
ON_EXPERTS = {
    "ddp-2": setup(2, "strategy=ddp"),
    "zero3-2": setup(2, "strategy=zero3"),
    "expert-2": setup(2, "mesh=expert=2"),
    "expert-2-again": Setup(2, ("parallel.mesh=expert=2", AGAIN)),
    "tensor-2": setup(2, "strategy=tensor"),
    "expert-4": setup(4, "mesh=expert=4"),
    "replicate×expert-4": setup(4, "mesh=replicate=2,expert=2"),
    "shard×expert-4": setup(4, "mesh=shard=2,expert=2"),
    "shard×expert-4-selective": Setup(4, ("parallel.mesh=shard=2,expert=2", SELECTIVE)),
    "expert×sequence-4": setup(4, "mesh=expert=2,tensor=2", "sequence_parallel=true"),
    "expert×context-4": setup(4, "mesh=expert=2,context=2"),
    "pipeline×expert-4": setup(4, "mesh=pipeline=2,expert=2"),
    "zbv×expert-4": setup(4, "mesh=pipeline=2,expert=2", "schedule=zbv"),
    "shard×expert×tensor-8": setup(8, "mesh=shard=2,expert=2,tensor=2"),
}
# One expert for each token, and three of them, after a dense layer; losses of the router, and full
# experts.
TOP_1 = (
    *(*EXPERTS, "model.experts=3", "model.top_k=1", "model.shared_experts=0"),
    *("model.expert_capacity=1.1", "model.dense_layers=1"),
    *("model.router_scores=sigmoid", "model.routed_scale=1.5"),
    *("model.balance_loss=0.05", "model.router_z_loss=0.01"),
    "data.global_batch=10",  # with rows of padding, which no expert counts
)
ON_TOP_1 = {
    "ddp-2": setup(2, "strategy=ddp"),
    "pipeline-2": setup(2, "strategy=pipeline"),
    "zero3-2-again": Setup(2, ("parallel.strategy=zero3", AGAIN)),
    "expert-2": setup(2, "mesh=expert=2"),  # two experts and one
    "expert-3": setup(3, "mesh=expert=3"),
    "shard×expert-4": setup(4, "mesh=shard=2,expert=2"),
}
MANY_CELLS = ("digits", "text", "experts")
ROUTED = ("experts", "top-1", "stacked")
"""Models whose tokens travel to experts."""
# Experts of a user's own, of which some ranks get no token at first.
STACKED = (*TEXT, "model.name=user_code:stacked")
ON_STACKED = {
    "expert-2": setup(2, "mesh=expert=2"),
    "expert-2-again": Setup(2, ("parallel.mesh=expert=2", AGAIN)),
    "shard×expert-4": setup(4, "mesh=shard=2,expert=2"),
    "pipeline×expert-4": setup(4, "mesh=pipeline=2,expert=2"),
}
SCATTERED = "parallel.reduce_scatter=micro-batch"
OWN_LOSS = "train.loss=user_code:token_losses"  # returns sums and weights
ON_ODD = {
    "pipeline-2": setup(2, "strategy=pipeline"),
    "interleaved-2": setup(2, "strategy=pipeline", "schedule=interleaved"),
    "pipeline×context-4": setup(4, "mesh=pipeline=2,context=2"),
    "pipeline×shard-4": setup(4, "mesh=pipeline=2,shard=2"),
    "pipeline×sequence-4": setup(4, "mesh=pipeline=2,tensor=2", "sequence_parallel=true"),
}
ON_TIED = {
    "ddp-1": setup(1, "strategy=ddp"),
    "ddp-2": setup(2, "strategy=ddp"),
    "zero1-2": setup(2, "strategy=zero1"),
    "zero3-2": setup(2, "strategy=zero3"),
    "tensor-2": setup(2, "strategy=tensor"),
    "context-2": setup(2, "strategy=context"),
    "ddp-4": setup(4, "strategy=ddp"),
    "hsdp-4": setup(4, "strategy=hsdp"),
    "shard×sequence-4": setup(4, "mesh=shard=2,tensor=2", "sequence_parallel=true"),
}
for name in ("zero3-2", "hsdp-4"):
    ON_TIED[f"{name}-scattered"] = ON_TIED[name]._replace(words=(*ON_TIED[name].words, SCATTERED))
for setups, name in ((ON_ODD, "interleaved-2"), (ON_TIED, "context-2"), (ON_TIED, "hsdp-4")):
    setups[f"{name}-own-loss"] = setups[name]._replace(words=(*setups[name].words, OWN_LOSS))
SOMETIMES = (*DIGITS, "model.name=user_code:sometimes")
CONTRACT = {
    "digits": (DIGITS, ON_DIGITS),
    "text": (TEXT, ON_TEXT),
    "odd": (ODD, ON_ODD),
    "tied": (TIED, ON_TIED),
    "sometimes": (SOMETIMES, {"ddp-2": setup(2, "strategy=ddp")}),
    "own": (OWN, ON_OWN),
    "experts": (EXPERTS, ON_EXPERTS),
    "top-1": (TOP_1, ON_TOP_1),
    "stacked": (STACKED, ON_STACKED),
}
CELLS = [(model, name) for model, (_, setups) in CONTRACT.items() for name in setups]


def by_ranks(cells: Sequence[tuple[str, str]]) -> list[ParameterSet]:
    """Mark the cells of several ranks as long: all of as many ranks are made together."""
    return [
        pytest.param(model, name, marks=mark(model, RUNS[model][1][name].world_size))
        for model, name in cells
    ]


def mark(model: str, ranks: int) -> pytest.MarkDecorator | tuple[()]:
    """Four ranks train the small models in CI; a campaign trains those with the most cells."""
    if ranks > 2 and model in MANY_CELLS:
        return pytest.mark.campaign
    return pytest.mark.long if ranks > 1 else ()


# Dropout draws other numbers on other ranks, so the result does not equal that of one process.
DROPOUT = (*OWN, "data.micro_batch=null", "model.dropout=0.2", "faults.divergence=stop")
GPT = "model.name=user_code:with_dropout"
ON_DROPOUT = {
    "zero3-2": setup(2, "strategy=zero3"),
    "tensor-2": setup(2, "strategy=tensor"),
    "context-2": setup(2, "strategy=context"),
    "sequence-2": setup(2, "strategy=tensor", "sequence_parallel=true"),
    "shard×tensor-4": setup(4, "mesh=shard=2,tensor=2"),
    "context×sequence-4": setup(4, "mesh=context=2,tensor=2", "sequence_parallel=true"),
}
DRAWN = tuple(ON_DROPOUT)
for name in ("sequence-2", "context×sequence-4"):
    ON_DROPOUT[name] = ON_DROPOUT[name]._replace(words=(*ON_DROPOUT[name].words, GPT))
for name in ("tensor-2", "sequence-2"):
    ON_DROPOUT[f"{name}-again"] = ON_DROPOUT[name]._replace(words=(*ON_DROPOUT[name].words, AGAIN))
ON_DROPOUT["pipeline-2"] = Setup(2, ("parallel.strategy=pipeline", GPT))
BATCHNORM = (*DIGITS, "model.name=user_code:with_batchnorm")
ON_BATCHNORM = {"zero3-2": setup(2, "strategy=zero3")}
# For what they send: number formats, and a batch that is not cut.
WHOLE = (*DIGITS, "data.micro_batch=null")
ON_WHOLE = {
    f"{strategy}-{precision}-2": Setup(
        2, (f"parallel.strategy={strategy}", f"precision={precision}")
    )
    for strategy in ("ddp", "zero3", "tensor")
    for precision in ("fp32", "bf16")
}
RUNS = {
    **CONTRACT,
    "dropout": (DROPOUT, ON_DROPOUT),
    "batchnorm": (BATCHNORM, ON_BATCHNORM),
    "whole": (WHOLE, ON_WHOLE),
}
CHECKED = [
    ("dropout", "tensor-2"),
    ("dropout", "context-2"),
    ("dropout", "pipeline-2"),
    ("batchnorm", "zero3-2"),
]
UNCHECKED = 'parallel.check="off"'
for model, name in CHECKED:
    setups = RUNS[model][1]
    setups[f"{name}-unchecked"] = setups[name]._replace(words=(*setups[name].words, UNCHECKED))
# The check before the first step takes a third of such a run. It passes on digits and on text under
# every mesh, and on these models under two ranks.
for model in ("odd", "tied", "own", "experts", "top-1"):
    setups = CONTRACT[model][1]
    for name, chosen in setups.items():
        if chosen.world_size > 2:
            setups[name] = chosen._replace(words=(*chosen.words, UNCHECKED))
ALONE = setup(1, "strategy=single")
WIDE = (
    *DIGITS,
    "model.hidden_size=1024",
    "parallel.bucket_mb=0.5",
    "optim.name=sgd",
    "optim.lr=0.05",
)
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
        lines = logged_steps(job.run_dir)
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
    """The result of a setup of RUNS; the first demand makes all of this model on as many ranks."""

    @cache
    def group(model: str, world_size: int) -> dict[str, Result] | RuntimeError:
        words, setups = RUNS[model]
        root = tmp_path_factory.mktemp(f"{model}-on-{world_size}")
        jobs = {
            name: Job(root / f"{model}-{name}", [*words, *chosen.words])
            for name, chosen in ({"alone": ALONE} | setups if model in CONTRACT else setups).items()
            if chosen.world_size == world_size
        }
        record = partial(_record, [job.root for job in jobs.values()])
        try:
            rank_jobs.run(
                list(jobs.values()), root / "logs", world_size, min(world_size, 2), record
            )
        except RuntimeError as error:
            return error  # each of its tests fails, and none tries again
        return {name: Result.read(job) for name, job in jobs.items()}

    def result(model: str, name: str) -> Result:
        results = group(model, {"alone": ALONE, **RUNS[model][1]}[name].world_size)
        if isinstance(results, RuntimeError):
            raise results
        return results[name]

    return result


def _record(roots: list[Path]) -> None:
    leave_out_operations()
    _record_gradients(roots)
    traffic.record(roots)


def _record_gradients(roots: list[Path]) -> None:
    """Let every rank write the gradients it has part in, and masks, at the first clip of a run."""
    clip, pending = Strategy.clip, iter(roots)
    seen: list[Strategy] = []

    def clip_and_record(strategy: Strategy, *args: Any, **kwargs: Any) -> torch.Tensor:
        weights = dict(strategy.model.named_parameters())
        found: dict[str, Any] = {name: weight.grad for name, weight in weights.items()}
        is_step = args[0] is not None  # otherwise the check before the first step
        # A step in which DDP finds unused weights has NaN, and is repeated.
        is_first = (
            is_step
            and strategy not in seen
            and all(one is None or one.isfinite().all() for one in found.values())
        )
        if is_first:
            seen.append(strategy)
            divisor = kwargs.get("divisor", args[1] if len(args) > 1 else None)
            for name, gradient in found.items():
                if gradient is not None:
                    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                    found[name] = whole / (1 if divisor is None else divisor)
        norm = clip(strategy, *args, **kwargs)
        if is_first:  # the norm needs zeros of unused weights, which are dropped after it
            used = {n: None if weights[n].grad is None else value for n, value in found.items()}
            file = next(pending) / f"gradients-{strategy.world.rank}.pt"
            file.parent.mkdir(exist_ok=True)
            torch.save(used, file)
            # The passes before the first step had two samples.
            masks = [mask for mask in user_code.MASKS if mask[1][0] > 2]
            file.with_name(f"masks-{strategy.world.rank}.json").write_text(json.dumps(masks))
        user_code.MASKS.clear()
        return norm

    setattr(Strategy, "clip", clip_and_record)  # noqa: B010


@pytest.mark.timeout(3600)  # the first one makes all of a model on as many ranks
@pytest.mark.parametrize(("model", "name"), by_ranks(CELLS))
def test_strategy_equals_one_process(model: str, name: str, made: Made) -> None:
    chosen = CONTRACT[model][1][name]
    result, expected = made(model, name), made(model, "alone")
    is_digits = CONTRACT[model][0][: len(DIGITS)] == DIGITS
    assert len(expected.losses) == (STEPS if is_digits else 4)
    assert min(expected.norms) < 0.2 < max(expected.norms) or not is_digits
    assert result.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert result.norms == pytest.approx(expected.norms, rel=NORM_TOLERANCE)
    assert result.evaluation == pytest.approx(expected.evaluation, rel=TOLERANCE)
    gradients = torch.load(expected.gradients[0])
    assert len(result.gradients) == chosen.world_size
    recorded = [torch.load(file) for file in result.gradients]
    assert set().union(*recorded) == set(gradients)
    for rank, found in enumerate(recorded):
        for key, gradient in found.items():
            assert (gradient is None) == (gradients[key] is None), f"{key} on rank {rank}"
            if gradient is None:  # frozen or unused
                continue
            error = (gradient - gradients[key]).norm() / gradients[key].norm()
            assert error < GRADIENT_TOLERANCE, f"{key} on rank {rank}"
    found, expected_weights = result.weights(), expected.weights()
    assert found.keys() == expected_weights.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected_weights[key], rtol=0, atol=WEIGHTS_TOLERANCE)


@pytest.mark.skipif(
    not torch.__version__.startswith("2.14"), reason="other versions of torch send otherwise"
)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        pytest.param(model, ranks, marks=mark(model, ranks), id=f"{model}-{ranks}")
        for model in (*CONTRACT, "whole")
        for ranks in sorted({chosen.world_size for chosen in RUNS[model][1].values()})
    ],
)
def test_a_step_sends_what_it_sent_before(model: str, ranks: int, made: Made) -> None:
    """Kind, group, type, size and order of the collectives of a step, on each rank."""
    found = {}
    for name, chosen in RUNS[model][1].items():
        is_free = "parallel.balance=time" in chosen.words  # may divide otherwise each time
        if chosen.world_size == ranks and not is_free:
            root = made(model, name).run_dir.path.parent
            found[f"{model}: {name}"] = traffic.read(root, chosen.world_size, model in ROUTED)
    traffic.compare(found)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("model", "name"), by_ranks([("dropout", name) for name in DRAWN]))
def test_dropout_follows_what_a_rank_holds(model: str, name: str, made: Made) -> None:
    """Ranks draw equal masks exactly where their activations are equal."""
    result, world_size = made(model, name), ON_DROPOUT[name].world_size
    root = result.run_dir.path.parent
    masks = [json.loads((root / f"masks-{rank}.json").read_text()) for rank in range(world_size)]
    assert all(len({mask for *_, mask in own}) == len(own) >= 5 for own in masks)
    copies = 2 if "tensor" in name or "sequence" in name else 1
    for a, b in itertools.combinations(range(world_size), 2):
        for (layer, _, mine), (_, _, theirs) in zip(masks[a], masks[b], strict=True):
            is_piece = "hidden" in layer or "sequence" in name
            is_same = a // copies == b // copies and not is_piece
            assert (mine == theirs) == is_same, f"{layer} on ranks {a} and {b}"
    first, *others = [torch.load(file) for file in result.gradients]
    for other in others:
        assert other.keys() == first.keys()
        for key, gradient in other.items():
            torch.testing.assert_close(gradient, first[key], msg=key)


@pytest.mark.long
@pytest.mark.parametrize("name", ["tensor-2", "sequence-2"])
def test_recomputation_draws_the_same_masks(name: str, made: Made) -> None:
    assert made("dropout", f"{name}-again").losses == made("dropout", name).losses


@pytest.mark.parametrize(("model", "name"), by_ranks(CHECKED))
def test_the_check_before_the_first_step_leaves_no_trace(model: str, name: str, made: Made) -> None:
    result, unchecked = made(model, name), made(model, f"{name}-unchecked")
    events = [line["event"] for line in read_lines(result.run_dir.events)]
    assert "spread_checked" in events
    assert result.losses == unchecked.losses and result.norms == unchecked.norms
    weights = unchecked.weights()
    for key, tensor in result.weights().items():
        assert torch.equal(tensor, weights[key]), key


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_any_strategy_resumes_any_other(tmp_path: Path) -> None:
    """And the matrix in the docs is what this prints, but for the noise of its numbers."""
    cells = strategy_matrix.measure(tmp_path, [UNCHECKED])
    print(strategy_matrix.table(cells))
    assert len(cells) == len(strategy_matrix.STRATEGIES) ** 2
    assert max(cells.values()) <= rank_jobs.TOLERANCE, strategy_matrix.table(cells)
    assert NUMBER.sub("#", strategy_matrix.table(cells)) in NUMBER.sub("#", DOCS.read_text())


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("model", "names", "step"),
    [
        pytest.param("tied", ("ddp-4", "hsdp-4"), 2, marks=mark("tied", 4)),
        pytest.param("digits", ("zero1-4", "hsdp-4", "pipeline-4"), SAVED, marks=mark("digits", 4)),
    ],
)
def test_the_same_mesh_resumes_to_the_last_bit(
    model: str, names: tuple[str, ...], step: int, made: Made, tmp_path: Path
) -> None:
    """What test_resume.py shows for ddp, there also for weights that are unused and shared."""
    words, setups = CONTRACT[model]
    jobs = {}
    for name in names:
        saved = made(model, name).run_dir.checkpoints / f"step-{step:08d}"
        job = Job(tmp_path / f"{model}-{name}", [*words, *setups[name].words, UNCHECKED])
        shutil.copytree(saved, job.run_dir.checkpoints / saved.name)
        jobs[name] = job
    rank_jobs.run([*jobs.values()], tmp_path / "logs", 4, 2, leave_out_operations)
    for name, job in jobs.items():
        whole, result = made(model, name), Result.read(job)
        assert result.losses == whole.losses[step:], (model, name)
        assert result.evaluation == whole.evaluation, (model, name)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_experts_resume_on_any_mesh(made: Made, tmp_path: Path) -> None:
    """And their biases, which no gradient moves."""
    whole = made("experts", "alone")
    names = ("alone", "expert-2", "shard×expert-4", "pipeline×expert-4")
    jobs: dict[int, dict[tuple[str, str], Job]] = {}
    for before, after in itertools.permutations(names, 2):
        chosen = {"alone": ALONE, **ON_EXPERTS}[after]
        job = Job(tmp_path / f"{before}-{after}", [*EXPERTS, *chosen.words, UNCHECKED])
        saved = made("experts", before).run_dir.checkpoints / "step-00000002"
        shutil.copytree(saved, job.run_dir.checkpoints / saved.name)
        jobs.setdefault(chosen.world_size, {})[before, after] = job
    for ranks, group in jobs.items():
        logs, of_a_node = tmp_path / f"logs-{ranks}", min(ranks, 2)
        rank_jobs.run([*group.values()], logs, ranks, of_a_node, leave_out_operations)
        for pair, job in group.items():
            result = Result.read(job)
            assert result.losses == pytest.approx(whole.losses[2:], rel=TOLERANCE), pair
            assert result.evaluation == pytest.approx(whole.evaluation, rel=TOLERANCE), pair
            found, expected = result.weights(), whole.weights()
            assert found["block0.experts.bias"].any()
            for key, tensor in found.items():
                difference = (tensor - expected[key]).abs().max()
                assert difference < WEIGHTS_TOLERANCE, (pair, key)


@pytest.mark.long
def test_zero1_resumes_where_a_rank_has_no_tensor_of_a_group(tmp_path: Path) -> None:
    """One of the groups is a single tensor; then there are fewer tensors than ranks."""
    words = [*DIGITS, "model.name=mlp", 'optim.groups={"1.bias": {lr: 0.01}}']
    alone = Job(tmp_path / "1", words)
    rank_jobs.run([alone], tmp_path / "logs-1", 1)
    for ranks in (2, 5):
        job = Job(tmp_path / str(ranks), [*words, "parallel.strategy=zero1"])
        for saved in (alone.run_dir.checkpoints / f"step-{SAVED:08d}", None):
            if saved:
                shutil.copytree(saved, job.run_dir.checkpoints / saved.name)
            else:
                shutil.rmtree(job.root)
            rank_jobs.run([job], tmp_path / f"logs-{ranks}", ranks)
            expected = alone.losses()[SAVED if saved else 0 :]
            assert job.losses() == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.long
def test_compression_stays_close(tmp_path: Path) -> None:
    """Several buckets, which PowerSGD must send in the same order on every rank."""
    jobs = {
        name: Job(tmp_path / name, [*WIDE, f"parallel.compression={name}"]) for name in COMPRESSIONS
    }
    rank_jobs.run(list(jobs.values()), tmp_path / "logs", 2)
    plain = Result.read(jobs.pop("none")).losses
    for name, job in jobs.items():
        found = Result.read(job).losses
        assert found != plain, name
        assert found == pytest.approx(plain, rel=COMPRESSIONS[name]), name


@pytest.mark.long
def test_the_documented_model_equals_one_process(tmp_path: Path) -> None:
    """The example of docs/parallelism.md, whose plans it brings itself."""
    [source] = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (tmp_path / "my_model.py").write_text(source)
    jobs = {
        strategy: Job(
            tmp_path / strategy,
            [
                *TEXT,
                "model.name=my_model:Net",
                f"parallel.strategy={strategy}",
            ],
        )
        for strategy in ("single", "pipeline", "split", "tensor", "context")
    }
    importable = partial(_import_from, tmp_path)
    alone = jobs.pop("single")
    rank_jobs.run([alone], tmp_path / "logs-1", 1, prepare=importable)
    rank_jobs.run(list(jobs.values()), tmp_path / "logs-2", 2, prepare=importable)
    for strategy, job in jobs.items():
        assert job.losses() == pytest.approx(alone.losses(), rel=TOLERANCE), strategy


def _import_from(directory: Path) -> None:
    sys.path.insert(0, str(directory))


@pytest.mark.long
def test_a_strategy_is_one_file_and_one_line(made: Made, tmp_path: Path) -> None:
    """The example of CONTRIBUTING.md, in a copy of the package."""
    for name in ("train", "rollcall"):
        shutil.copytree(ROOT / name, tmp_path / name)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    file, line = blocks
    (tmp_path / "rollcall/train/parallel/by_hand.py").write_text(file)
    mesh = tmp_path / "rollcall/config/mesh.py"
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
    assert "2 ranks = 2 replicas" in output[0]
    expected = made("digits", "alone")
    assert Result.read(job).losses == pytest.approx(expected.losses, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [*DIGITS, "parallel.mesh=replicate=2,shard=2"],
            "parallel.mesh=replicate=2,shard=2 needs 4 ranks, but got 2; start that number, "
            "choose a mesh of 2, or parallel.strategy=ddp",
        ),
        (
            [
                *DIGITS,
                "parallel.strategy=pipeline",
                "parallel.schedule=interleaved",
                "model.name=mlp",
            ],
            "pipeline=2 with 2 stages on each rank makes 4 stages, but the model has only 2 layers "
            "with weights; choose at most pipeline=1",
        ),
        (
            [*DIGITS, "parallel.strategy=pipeline", "data.micro_batch=50"],
            "data.micro_batch=50 makes 1 micro-batches of 50 samples, which "
            "parallel.schedule=1f1b cannot run over 2 stages on 2 ranks: it needs at least 2; "
            "choose data.micro_batch=49, or parallel.schedule=gpipe",
        ),
        (
            [*OWN, "parallel.strategy=context", "model.name=user_code:own_positions"],
            "parallel.strategy=context computes something else than one rank would: its loss "
            "differs by # of its size, first in the output of positions on rank 1; look for "
            "position ids that the model makes itself",
        ),
        (
            [
                *OWN,
                "data.name=user_code:unshifted",
                "parallel.strategy=context",
                "train.loss=next_token",
            ],
            "train.loss=next_token predicts the first token of a piece from the piece before it",
        ),
        (
            [*OWN, "train.loss=next_token"],
            "train.loss=next_token predicts each target from those before it, but the targets of "
            "this data set are the next tokens already: use cross_entropy",
        ),
        (
            [*OWN, "parallel.strategy=tensor", "model.name=user_code:mixed_units"],
            "parallel.strategy=tensor computes something else than one rank would: its loss "
            "differs by # of its size, first in the output of blocks.0.down on rank 0; look for "
            "columns layers in tensor_plan",
        ),
        (
            [*OWN, "parallel.strategy=tensor", "model.name=user_code:seeded_by_rank"],
            "parallel.strategy=tensor: the output of dropout differs between the ranks of a tensor "
            "group",
        ),
    ],
)
def test_what_does_not_fit_starts_nothing(words: list[str], message: str, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    ranks = Ranks(2, [*words, f"run.root={root}"], tmp_path)
    assert ranks.wait() == [2, 2]
    output = NUMBER.sub("#", ranks.output())
    assert output.startswith(f"rollcall: error: {message}")
    assert ranks.output().count("\n") == 1
    assert not root.exists()


def test_accumulation_sends_gradients_once(tmp_path: Path) -> None:
    """Three micro-batches cost what one does, but for what may not be kept whole on a rank."""
    together(2, _count_collectives, tmp_path)
    for file in tmp_path.glob("rank-*.json"):
        for strategy, (one, three) in json.loads(file.read_text()).items():
            gathers = [counted.pop("_allgather_base_", 0) for counted in (one, three)]
            if SCATTERED in strategy:
                assert three == {kind: 3 * count for kind, count in one.items()}
            assert one and (three == one or SCATTERED in strategy), strategy
            assert gathers[1] == gathers[0] * (3 if "zero3" in strategy else 1), strategy


def _count_collectives(rank: int, folder: Path) -> None:
    world = World.join("cpu")
    counts: dict[str, list[dict[str, int]]] = {}
    for name in ("ddp", "zero1", "zero2", "zero3", "hsdp", f"zero2 {SCATTERED}"):
        config = parse(f"parallel.strategy={name}".split())[1]
        source = sets.load(config.data, world)
        batch = next(validation_batches(source, 4, world.rank, world.world_size))
        strategy = Strategy(config, world, losses.Objective(losses.build("cross_entropy")))
        strategy.place(models.build(config.model, source), batch)
        strategy.warm_up(batch)
        counts[name] = []
        for micro_batches in ([batch], [batch] * 3):
            with Collectives() as collectives:
                strategy.forward_backward(micro_batches, 8)
            counts[name].append(collectives.counts)
    (folder / f"rank-{rank}.json").write_text(json.dumps(counts))
    world.leave()
