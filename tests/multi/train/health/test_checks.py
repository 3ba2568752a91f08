"""A model trains as in a plain loop on any ranks, or is refused before the first step."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import user_surprises
from ranks import logged_steps, together
from torch.nn import functional

from rollcall.config import ConfigError, parse
from rollcall.records.run_dir import RunDir
from rollcall.train import training
from rollcall.train.data.order import Order
from rollcall.train.ranks.signals import StopSignals
from rollcall.train.ranks.world import World
from rollcall.train.weights.deferred import Draws

BATCH, STEPS, RATE = 8, 6, 0.1
WORDS = ["digits", "device=cpu", f"data.global_batch={BATCH}", f"train.steps={STEPS}"]
WORDS += ["log.every=1", "optim.name=sgd", f"optim.lr={RATE}", "optim.schedule=constant"]
WORDS += [
    "optim.warmup_steps=0",
    "optim.weight_decay=0",
    "train.evaluate_every=null",
    "checkpoint.every=null",
]
TOLERANCE = 1e-6  # relative, of losses: fp32 sums in another order
Ends = tuple[dict[str, str], Path]


def words(model: str, strategy: str, *more: str) -> list[str]:
    data = "tokens" if model.endswith("Words") or model == "Limited" else "vectors"
    named = [f"model.name=user_surprises:{model}", f"data.name=user_surprises:{data}"]
    return [*WORDS, *named, f"parallel.strategy={strategy}", *more]


def by_hand(case: Any, batch: int) -> list[float]:
    """The losses of a plain loop over whole batches."""
    kind, loss = case if isinstance(case, tuple) else (case, functional.cross_entropy)
    with Draws(0):
        model = kind()
    x, y = user_surprises.vectors_by_hand()
    order = Order(len(x), STEPS * batch, batch, seed=0)
    # Momentum would be a sparse tensor, which is refused.
    momentum = 0.0 if kind is user_surprises.Sparse else 0.9
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    losses = []
    for step in range(STEPS):
        rows = torch.tensor(order.samples(step, range(batch))[0])
        value = loss(model(x[rows]), y[rows]).mean()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


GATHERED = "train.loss=user_surprises:contrastive", "train.gather=true"
REFUSED = {
    "scale-of-training-in-a-pipeline": (
        words("Scales", "pipeline", "data.micro_batch=2"),
        "parallel.strategy=pipeline computes something else than one rank would: its loss",
    ),
    "a-weight-of-16-bits-does-not-hide-it": (
        words("HalfScales", "pipeline", "data.micro_batch=2"),
        "parallel.strategy=pipeline computes something else than one rank would: its loss",
    ),
    "scale-of-training-in-stages": (
        words("Scales", "split"),
        "parallel.strategy=split computes something else than one rank would: its loss",
    ),
    "norm-of-training-over-split-features": (
        words("Normalizes", "tensor"),
        "parallel.strategy=tensor computes something else than one rank would: its loss",
    ),
    "mean-of-training-over-a-cut-sequence": (
        words("Words", "context"),
        "parallel.strategy=context computes something else than one rank would: its loss",
    ),
    "random-numbers-do-not-hide-it": (
        words("NoisyWords", "context"),
        "parallel.strategy=context computes something else than one rank would: its loss",
    ),
    "statistics-of-a-batch": (
        words("Spread", "ddp"),
        "the output of last depends on the other samples of a batch",
    ),
    "statistics-of-a-batch-zero3": (
        words("Spread", "zero3"),
        "the output of last depends on the other samples of a batch",
    ),
    "statistics-of-all-ranks-zero3": (
        words("Synchronized", "zero3"),
        "the output of last depends on the other samples of a batch",
    ),
    "statistics-that-one-sample-lacks": (
        words("Deviates", "ddp"),
        "the output of last depends on the other samples of a batch",
    ),
    "contrastive-loss": (
        words("Net", "ddp", "train.loss=user_surprises:contrastive"),
        "train.loss=user_surprises:contrastive depends on the other samples of a batch",
    ),
    "contrastive-loss-that-calls-the-model": (  # of two samples that do not attract each other
        words("Net", "ddp", "train.loss=user_surprises:contrastive_of_model"),
        "train.loss=user_surprises:contrastive_of_model depends on the other samples of a batch",
    ),
    "running-mean-of-a-loss": (
        words("Net", "ddp", "train.loss=user_surprises:Running"),
        "train.loss=user_surprises:Running depends on the other samples of a batch",
    ),
    "running-mean-of-a-loss-that-is-alike": (
        words("Even", "ddp", "train.loss=user_surprises:Running"),
        "train.loss=user_surprises:Running depends on the other samples of a batch",
    ),
    "running-mean-before-a-gathered-loss": (
        words("Centers", "ddp", *GATHERED),
        "forward() changes the buffers mean by the samples that it sees",
    ),
    "running-mean": (
        words("Centers", "ddp"),
        "forward() changes the buffers mean by the samples that it sees, so each rank would have "
        "its own: set model.sync_buffers={mean: mean}",
    ),
    "mean-of-two-samples-at-most": (
        words("Narrow", "zero3"),
        "the output of first depends on the other samples of a batch",
    ),
    "count-of-samples": (
        words("Counts", "zero3"),
        "forward() changes the buffers seen by the samples that it sees, so each rank would have "
        "its own: set model.sync_buffers={seen: sum}",
    ),
    "codebook": (
        words("Codebook", "ddp"),
        "forward() changes the buffers codes, uses by the samples that it sees",
    ),
    "codebook-of-the-first-rank": (
        words("FirstCodebook", "ddp"),
        "forward() changes the buffers embed_avg by the samples that it sees, so each rank would "
        "have its own: let forward() add up what it changes them by, with torch.distributed, as in "
        "dist.all_reduce(counts)",
    ),
    "weights-that-forward-changes": (
        words("Limited", "ddp"),
        "forward() changes the weights embedding.weight by the samples that it sees",
    ),
    "weights-that-forward-changes-zero3": (
        words("Limited", "zero3"),
        "forward() changes the weights embedding.weight by the samples that it sees",
    ),
    "gradient-by-frequency": (
        words("Frequent", "ddp"),
        "the gradient of words depends on the other samples of a batch, so the result would",
    ),
    "gradient-by-frequency-before-a-gathered-loss": (
        words("Frequent", "zero3", *GATHERED),
        "the gradient of words depends on the other samples of a batch, so the result would",
    ),
    "weights-that-two-samples-change-alike": (
        words("Seldom", "ddp"),
        "forward() changes the weights words.weight by the samples that it sees",
    ),
    "codebook-zero3": (
        words("Codebook", "zero3"),
        "forward() changes the buffers codes, uses by the samples that it sees",
    ),
    "contrastive-loss-zero3": (
        words("Net", "zero3", "train.loss=user_surprises:contrastive"),
        "train.loss=user_surprises:contrastive depends on the other samples of a batch",
    ),
    "heads-that-some-samples-use": (
        words("Heads", "zero3"),
        "parallel.strategy=zero3 gathers weights on all ranks together, but only some samples use "
        "heads.*: set parallel.conditional=heads.* to keep them whole on each rank",
    ),
    "heads-of-the-samples-that-ranks-share": (
        words("HeadsOfRanks", "zero3"),
        "parallel.strategy=zero3 gathers weights on all ranks together, but only some samples use "
        "heads.*: set",
    ),
    "heads-that-some-samples-use-zero2": (
        words("Heads", "zero2"),
        "parallel.strategy=zero2 gathers weights on all ranks together, but only some samples use "
        "heads.",
    ),
    "unequal-heads-zero2": (
        words("UnequalHeads", "zero2", "data.micro_batch=1"),
        "parallel.strategy=zero2 gathers weights on all ranks together, but only some samples use "
        "heads.",
    ),
    "unequal-heads-zero3": (
        words("UnequalHeads", "zero3"),
        "parallel.strategy=zero3 gathers weights on all ranks together, but only some samples use "
        "heads.",
    ),
    "hook-before-a-gathered-loss": (  # of samples of two classes, which attract no other
        words("Hooked", "zero3", *GATHERED),
        "parallel.strategy=zero3 computes something else than one rank would: the norm of its",
    ),
}


AGAIN = "model.activation_checkpointing=blocks"
CONTRASTIVE = (user_surprises.Net, user_surprises.contrastive)
EQUAL: dict[str, tuple[Any, list[str]]] = {
    "replaced-buffer-zero3": (user_surprises.Replaces, words("Replaces", "zero3")),
    "replaced-buffer-ddp": (user_surprises.Replaces, words("Replaces", "ddp")),
    "stages-of-different-types": (
        user_surprises.DoubleStage,
        words("DoubleStage", "pipeline", "data.micro_batch=2"),
    ),
    "activation-that-is-used-twice": (
        user_surprises.Reused,
        words("Reused", "pipeline", "data.micro_batch=2"),
    ),
    "mapped-and-nested-ddp": (user_surprises.Mapped, words("Mapped", "ddp")),
    "mapped-and-nested-zero3": (user_surprises.Mapped, words("Mapped", "zero3")),
    "rare-samples": (user_surprises.Rare, words("Rare", "ddp", "model.sync_buffers={seen: sum}")),
    "counter-ddp": (user_surprises.Remembers, words("Remembers", "ddp")),
    "counter-zero3": (user_surprises.Remembers, words("Remembers", "zero3")),
    "input-in-place-zero3": (user_surprises.Doubles, words("Doubles", "zero3")),
    "input-in-place-repeated": (user_surprises.InPlace, words("InPlace", "ddp")),
    "input-in-place-out-of-memory": (user_surprises.Exhausted, words("Exhausted", "ddp")),
    "weight-that-follows-repeated": (user_surprises.Follows, words("Follows", "ddp")),
    "weight-that-follows-from-the-start": (
        user_surprises.FollowsFromTheStart,
        words("FollowsFromTheStart", "ddp"),
    ),
    "weight-that-gets-other-memory": (
        user_surprises.ReplacingBlocks,
        words("ReplacingBlocks", "ddp"),
    ),
    "logits-ddp": (
        (user_surprises.Scored, lambda out, y: functional.cross_entropy(out.logits, y)),
        words("Scored", "ddp", "train.loss=user_surprises:of_logits"),
    ),
    "logits-zero3": (
        (user_surprises.Scored, lambda out, y: functional.cross_entropy(out.logits, y)),
        words("Scored", "zero3"),
    ),
    "fp64-zero3": (user_surprises.Exact, words("Exact", "zero3")),
    "recomputed-blocks": (
        user_surprises.Blocks,
        words("Blocks", "ddp", AGAIN),
    ),
    "recomputed-blocks-selective": (
        user_surprises.Blocks,
        words("Blocks", "zero3", "model.activation_checkpointing=selective"),
    ),
    "recomputed-blocks-that-the-model-changes": (
        user_surprises.Counting,
        words("Counting", "ddp", AGAIN),
    ),
    "recurrent-ddp": (user_surprises.Recurrent, words("Recurrent", "ddp")),
    "recurrent-zero3": (user_surprises.Recurrent, words("Recurrent", "zero3")),
    "annealed-loss-ddp": (
        (user_surprises.Net, user_surprises.Annealed()),
        words("Net", "ddp", "train.loss=user_surprises:Annealed"),
    ),
    "running-mean-of-a-gathered-loss": (
        (user_surprises.Net, user_surprises.Running()),
        words("Net", "ddp", "train.loss=user_surprises:Running", "train.gather=true"),
    ),
    "conditional-heads": (
        user_surprises.Heads,
        words("Heads", "zero3", "parallel.conditional=heads.*"),
    ),
    "conditional-heads-zero2": (
        user_surprises.Heads,
        words("Heads", "zero2", "parallel.conditional=heads.*"),
    ),
    "unequal-heads-that-stay-whole": (
        user_surprises.UnequalHeads,
        words("UnequalHeads", "zero3", "parallel.conditional=heads.*", "data.micro_batch=1"),
    ),
    "contrastive-ddp": (CONTRASTIVE, words("Net", "ddp", *GATHERED)),
    "contrastive-zero3-micro": (
        CONTRASTIVE,
        words("Net", "zero3", *GATHERED, "data.micro_batch=3"),
    ),
    "contrastive-ddp-padded": (
        CONTRASTIVE,
        words("Net", "ddp", *GATHERED, "data.global_batch=7", "data.micro_batch=1"),
    ),
    "block-that-is-used-twice-zero2": (
        (user_surprises.SharedBlocks, user_surprises.contrastive),
        words("SharedBlocks", "zero2", *GATHERED, "data.global_batch=7"),
    ),
    "block-that-is-used-twice-by-a-loss-of-the-user-zero2": (
        user_surprises.SharedBlocks,
        words("SharedBlocks", "zero2", "train.loss=user_state:cross_entropy"),
    ),
    "weights-that-forward-freezes-zero3": (user_surprises.Freezes, words("Freezes", "zero3")),
    "shared-mean-ddp": (
        user_surprises.Centers,
        words("Centers", "ddp", "model.sync_buffers={mean: mean}"),
    ),
    "codebook-that-adds-up-over-ranks": (
        user_surprises.SharedCodebook,
        words("SharedCodebook", "zero3"),
    ),
    "shared-sum-zero3": (
        user_surprises.Counts,
        words("Counts", "zero3", 'model.sync_buffers={"*": sum}'),
    ),
    "no-memory-for-the-plain-model": (user_surprises.Net, words("Greedy", "zero3")),
    "no-memory-on-one-rank": (user_surprises.Net, words("GreedyOnOneRank", "ddp")),
    "no-memory-for-the-spread-model": (user_surprises.Net, words("GreedyWhenSpread", "zero3")),
    "no-memory-while-others-wait-ddp": (user_surprises.Net, words("GreedyBeforeMessages", "ddp")),
    **{
        f"no-memory-while-others-wait-{model}-{strategy}": (
            user_surprises.Net,
            words(model, strategy),
        )
        for model in ("GreedyAmongOthers", "GreedyInBackward")
        for strategy in ("zero2", "zero3", "tensor")
    },
    "heads-ddp": (user_surprises.Heads, words("Heads", "ddp")),
    "sparse-gradient-beside-a-layer": (
        user_surprises.Sparse,
        words("Sparse", "ddp", "optim.momentum=0"),
    ),
    **{
        f"{name}-{strategy}": (getattr(user_surprises, name), words(name, strategy))
        for name in ("Parametrized", "Masked")
        for strategy in ("ddp", "zero1", "zero3")
    },
    "collate-that-draws-nothing": (
        user_surprises.Net,
        words("Net", "ddp", "data.collate=user_surprises:stacked"),
    ),
}


MIXED = {
    "heads-unseen": words("Heads", "zero3", "data.global_batch=2", "parallel.check=off"),
    "branches-unseen": words("Branches", "zero2", "data.global_batch=2", "parallel.check=off"),
    "words-of-one-shard-unseen": words(
        "Token", "zero2", "data.global_batch=2", "parallel.check=off"
    ),
    "branches-of-unequal-sizes": words(
        *("UnequalBranches", "zero3", "data.global_batch=2", "parallel.check=off")
    ),
}
if torch.__version__ < "2.14":  # gloo ends the process before the ranks can compare the others
    MIXED = {"heads-unseen": MIXED["heads-unseen"]}
    del EQUAL["logits-zero3"]  # FSDP finds no tensors in a data class
ACCEPTED = {
    "batchnorm-dropout-and-noise-ddp": words("Batches", "ddp"),
    "batchnorm-dropout-and-noise-zero3": words("Batches", "zero3"),
    "no-slope-zero3": words("Net", "zero3", "train.loss=user_surprises:zero_loss"),
    "weight-of-training-context": words("ExtraWords", "context"),
    "unusual-code": words("Unusual", "ddp"),
    "collate-that-draws": words("Net", "zero3", "data.collate=user_surprises:mixed"),
    "weight-of-16-bits-pipeline": words("WithHalf", "pipeline", "data.micro_batch=2"),
    "frozen-stages": words(
        *("FrozenStages", "pipeline", "parallel.schedule=interleaved", "data.micro_batch=2")
    ),
    "weight-of-16-bits-zero3": words("WithHalf", "zero3", "data.micro_batch=2"),
    "warning": words("Spread", "ddp", "parallel.check=warn"),
    "teacher-out-of-memory": words("FollowsAndExhausts", "ddp"),
    "running-mean-of-zeros-ddp": words("Level", "ddp", "train.loss=user_surprises:Running"),
    "running-mean-of-zeros-zero3": words(*("Level", "zero3", "train.loss=user_surprises:Running")),
    "repeated-samples": words(
        *("Centers", "ddp", "model.sync_buffers={mean: mean}", "data.global_batch=7")
    ),
}
TWICE = "model.activation_checkpointing=blocks computes each block again, but the forward() of "
BROKEN = {
    "weights-that-forward-freezes-ddp": (
        words("Freezes", "ddp"),
        "forward() sets requires_grad of weights to False, which ranks",
    ),
    "recomputed-blocks-of-teachers": (
        words("FollowingBlocks", "ddp", AGAIN),
        f"{TWICE}Following changes its weights teacher.weight, so",
    ),
    "recomputed-blocks-of-new-teachers": (
        words("ReplacingBlocks", "zero3", AGAIN),
        f"{TWICE}Replacing changes its weights teacher.weight, so",
    ),
    "recomputed-blocks-that-change-inputs": (
        words("DoublingBlocks", "ddp", AGAIN),
        f"{TWICE}Doubling changes its inputs in place, so",
    ),
    "recomputed-blocks-whose-inputs-change-later": (
        words("ShiftingBlocks", "ddp", AGAIN),
        "the model changes a tensor in place that the backward pass still needs, such as an input",
    ),
    "recomputed-blocks-whose-inputs-change-later-zero3": (
        words("ShiftingBlocks", "zero3", AGAIN),
        "the model changes a tensor in place that the backward pass still needs, such as an input",
    ),
    "layers-that-look-at-values-in-a-pipeline": (
        words("LookingLayers", "pipeline", "data.micro_batch=2"),
        "a pipeline needs the shapes of a model before its weights exist, but the forward() of "
        "layer 1 depends on values: choose ddp",
    ),
    "layers-that-need-slopes-in-a-pipeline": (
        words("SlopedLayers", "pipeline", "data.micro_batch=2"),
        "a pipeline needs the shapes of a model before its weights exist, but the forward() of "
        "layer 1 fails without them: choose ddp",
    ),
    "memory-of-a-weight": (
        words("Mirrored", "ddp"),
        "model.name=user_surprises:Mirrored: copy has the memory of the weight last.weight, but",
    ),
    "sparse-state-of-an-optimizer": (
        words("Sparse", "ddp"),
        "optim.name=sgd: its state has 'momentum_buffer', a sparse tensor; let it hold dense",
    ),
    "sparse-gradient-zero3": (
        words("Sparse", "zero3"),
        "parallel.strategy=zero3 cannot add up the sparse gradient of words: leave out sparse=True",
    ),
    "dense-gradient-of-a-sparse-embedding": (
        words("Sparse", "ddp", "train.loss=user_state:penalized"),
        "the loss also uses the weight of an embedding with sparse=True by other ways, which",
    ),
    "recomputed-blocks-of-nested-tensors": (
        words("RaggedBlocks", "ddp", AGAIN),
        "a block does not compute the same tensors when it is computed again: set "
        "model.activation_checkpointing=none",
    ),
    "last-stage-that-is-computed-again-the-old-way": (
        words("ReentrantStage", "pipeline", "data.micro_batch=2"),
        "the model calls torch.utils.checkpoint with use_reentrant=True, which a pipeline",
    ),
    "first-stage-of-whole-numbers": (
        words("RoundingStage", "pipeline", "data.micro_batch=2"),
        "stages of a pipeline hand on floating-point numbers in at most 7 dimensions, but stage 0",
    ),
    "last-stage-that-changes-a-tensor-in-place": (
        words("OverwritingStage", "pipeline", "data.micro_batch=2"),
        "the model changes a tensor in place that the backward pass still needs, such as an input",
    ),
    "reentrant-with-unused-weights": (
        words("Reentrant", "ddp"),
        "the model calls torch.utils.checkpoint with use_reentrant=True, which DDP cannot do",
    ),
}
if torch.__version__ < "2.14":  # it trains
    del BROKEN["last-stage-that-is-computed-again-the-old-way"]
FAILING = {
    "error-beside-a-message-of-a-split-weight": words("Failing", "tensor"),
    "error-beside-a-gather": words("Failing", "zero3"),
    "exit-beside-a-message": words("Exiting", "tensor"),
    "error-in-a-stage": words("FailingStage", "pipeline", "data.micro_batch=2"),
}
COUNTED = {
    "counted-ddp": words("Counted", "ddp"),
    "counted-zero3": words("Counted", "zero3"),
    "counted-tensor": words("Counted", "tensor"),
}
CASES = {name: given for name, (given, _) in REFUSED.items()}
CASES |= MIXED | COUNTED | FAILING | {name: given for name, (given, _) in BROKEN.items()}
CASES |= {name: given for name, (_, given) in EQUAL.items()} | ACCEPTED


ANNOUNCED = {
    "repeated-samples",
    "shared-mean-ddp",
    "collate-that-draws",
    "collate-that-draws-nothing",
}
ANNOUNCED |= {"no-memory-while-others-wait-GreedyInBackward-zero3"}
ANNOUNCED |= {"no-memory-while-others-wait-GreedyAmongOthers-tensor"}
ANNOUNCED |= {"teacher-out-of-memory", "input-in-place-out-of-memory"}
ANNOUNCED |= {"running-mean-of-zeros-ddp", "running-mean-of-zeros-zero3"}
"""Cases of tests about warnings."""


def some(names: Iterable[str]) -> list[Any]:
    """Every third case runs with the short tests."""
    return [
        pytest.param(name, marks=[pytest.mark.long] if number % 3 else [])
        for number, name in enumerate(names)
    ]


@contextlib.contextmanager
def redirect(printed: io.StringIO) -> Iterator[None]:
    """Collect all that is printed."""
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        yield


def do_all(rank: int, folder: Path) -> None:
    """Be a rank that does all cases, and notes how each ends."""
    world = World.join("cpu")
    ends: dict[str, str] = {}
    passed, warned = {}, {}
    for name in (folder / "names").read_text().split():
        given = CASES[name]
        _, config = parse([*given, f"run.root={folder}", f"run.name={name}"])
        printed = io.StringIO()
        with StopSignals() as signals, redirect(printed):
            try:
                ends[name] = training.train("digits", config, world, signals)
            except ConfigError as error:
                ends[name] = f"ConfigError: {error}" if name in FAILING else str(error)
            except (ValueError, RuntimeError) as error:  # of a model in FAILING, on its rank
                ends[name] = str(error)
        warned[name] = printed.getvalue()
        passed[name], user_surprises.Counted.passes[:] = [*user_surprises.Counted.passes], []
    (folder / f"passed-{rank}.json").write_text(json.dumps(passed))
    (folder / f"warned-{rank}.json").write_text(json.dumps(warned))
    (folder / f"ends-{rank}.json").write_text(json.dumps(ends))
    world.leave()


@pytest.fixture(scope="module")
def ends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """How each chosen case ended, on all ranks alike, and where."""
    folder = tmp_path_factory.mktemp("checks")
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    given = {item.callspec.params.get("case") for item in items if hasattr(item, "callspec")}
    chosen = [name for name in CASES if name in given | ANNOUNCED]
    (folder / "names").write_text("\n".join(chosen))
    together(2, do_all, folder)
    first, second = (json.loads((folder / f"ends-{rank}.json").read_text()) for rank in range(2))
    assert {name for name in first if first[name] != second[name]} <= {*FAILING}
    return first, folder


@pytest.mark.parametrize("case", some(REFUSED))
def test_what_would_differ_is_refused_before_the_first_step(case: str, ends: Ends) -> None:
    (reasons, folder), (_, message) = ends, REFUSED[case]
    assert reasons[case].startswith(message)
    assert reasons[case].endswith("; or set parallel.check=warn to train anyway")
    assert not (folder / case).exists()


@pytest.mark.parametrize("case", some(MIXED))
def test_ranks_that_mix_weights_end_the_run(case: str, ends: Ends) -> None:
    reason = ends[0][case]
    assert re.search("the ranks did not use the same weights before step [2-5]", reason)
    assert case.split("-")[0] in reason


@pytest.mark.parametrize("case", some(BROKEN))
def test_what_no_check_could_allow_ends_the_run(case: str, ends: Ends) -> None:
    assert ends[0][case].startswith(BROKEN[case][1])


@pytest.mark.parametrize("case", FAILING)
def test_an_error_of_one_rank_ends_the_check_on_all(case: str, ends: Ends) -> None:
    reasons, folder = ends
    own = json.loads((folder / "ends-1.json").read_text())[case]
    assert own.startswith(("no such token", "data, a model or a callback called sys.exit(3)"))
    what = own if "exit" in case else f"ValueError: {own}"
    sentence = f"rank 1 failed in the check before the first step: {what}"
    assert reasons[case] == f"ConfigError: {sentence}"
    assert not (folder / case).exists()


@pytest.mark.parametrize("case", some([*EQUAL, *ACCEPTED]))
def test_what_is_accepted_trains(case: str, ends: Ends) -> None:
    reasons, folder = ends
    assert reasons[case] == "done"
    lines = logged_steps(RunDir(folder, case))
    losses = [line["loss"] for line in lines]
    assert len(losses) == STEPS
    if case in EQUAL:
        batch = 7 if "data.global_batch=7" in CASES[case] else BATCH
        assert losses == pytest.approx(by_hand(EQUAL[case][0], batch), rel=TOLERANCE)


def test_samples_that_are_repeated_to_divide_a_batch_are_announced(ends: Ends) -> None:
    warned = json.loads((ends[1] / "warned-0.json").read_text())
    assert "forward() changes mean by these too, so the result" in warned["repeated-samples"]
    assert "repeat samples" not in warned["shared-mean-ddp"]


def test_values_of_which_each_rank_has_its_own_are_announced(ends: Ends) -> None:
    warned = json.loads((ends[1] / "warned-0.json").read_text())
    text = "warning: the ranks have different values of model.newest, train.loss.mean, which"
    named = {name for name, printed in warned.items() if text[:40] in printed}
    assert named == {"running-mean-of-zeros-ddp", "running-mean-of-zeros-zero3"}
    assert all(text in warned[name] for name in named)


def test_a_collate_function_that_draws_is_announced(ends: Ends) -> None:
    warned = json.loads((ends[1] / "warned-0.json").read_text())
    text = "warning: data.collate=user_surprises:mixed draws random numbers for the rows of a rank"
    assert warned["collate-that-draws"].count(text) == 1
    assert "draws random numbers" not in warned["collate-that-draws-nothing"]


def test_a_check_without_memory_is_left_out_with_a_word(ends: Ends) -> None:
    warned = json.loads((ends[1] / "warned-0.json").read_text())
    text = "rollcall: parallel.check was left out: rank 1 has too little memory for it"
    names = [name for name in warned if "while-others-wait" in name]
    assert len(names) >= 2
    assert all(warned[name].count(text) == 1 for name in names)


def test_smaller_micro_batches_that_change_the_result_are_announced(ends: Ends) -> None:
    warned = json.loads((ends[1] / "warned-0.json").read_text())
    text = "; forward() changes teacher.weight once in each of these, so the result differs"
    text = f"ran out of memory; repeating it with 2 samples at once{text}"
    assert text in warned["teacher-out-of-memory"]
    assert "forward() changes" not in warned["input-in-place-out-of-memory"]


@pytest.mark.parametrize("case", some(COUNTED))
def test_few_samples_pass_before_the_first_step(case: str, ends: Ends) -> None:
    (reasons, folder), steps = ends, STEPS * (BATCH if "tensor" in case else BATCH // 2)
    assert reasons[case] == "done"
    for rank in range(2):
        passed = json.loads((folder / f"passed-{rank}.json").read_text())[case]
        assert steps < sum(passed) <= steps + 8, passed
        # A model that draws no random numbers does not pass with them.
        assert len(passed) <= STEPS + {"ddp": 5, "zero3": 4, "tensor": 3}[case[8:]], passed
