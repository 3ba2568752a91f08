"""Code that users bring equals one process under the strategies, and resumes on other ranks."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import user_tasks
from ranks import leave_out_operations

from rollcall.tools.bench import rank_jobs
from rollcall.tools.bench.rank_jobs import Job

TOLERANCE = 1e-6  # relative, of losses and the evaluation: fp32 sums in another order
BASE = (
    "device=cpu",
    "data.global_batch=10",
    "checkpoint.every=2",
    "log.every=1",
    "checkpoint.keep_last=9",
)
SHORT = ("train.steps=5", "train.evaluate_every=null", "optim.clip_norm=0.5", "optim.lr=0.01")
# Rows of unequal length with masks, next-word targets, two validation sets, a metric of counts,
# Muon for matrices and AdamW for the rest, and a floor.
SENTENCES = (
    *(*BASE, *SHORT, "data.name=user_tasks:sentences", "data.pad=true", "data.micro_batch=3"),
    *("model.name=user_tasks:Net", "model.args.width=8", "train.loss=next_token"),
    *("train.metrics=user_tasks:Right", "optim.name=muon", "optim.args.ns_steps=3"),
    'optim.groups={"embed*": {optimizer: adamw, lr: 0.003, betas: [0.9, 0.95]}}',
    *("optim.schedule=cosine", "optim.min_lr_ratio=0.1"),
)
# The same rows; the model returns the mean of its losses, over its own rows alone.
RETURNED = (
    *(*BASE, *SHORT, "data.name=user_tasks:sentences", "data.pad=true", "data.micro_batch=3"),
    *("model.name=user_tasks:Whole", "model.args.width=8", "train.loss=model"),
)
# A stream of 23 samples that begins again in step 3, read by a worker; a loss of model and batch;
# a schedule and a member of the step.
STREAM = (
    *(*BASE, *SHORT, "data.name=user_tasks:stream", "data.pad=true", "data.num_workers=2"),
    *("model.name=user_tasks:Net", "model.args.width=8", "train.loss=user_tasks:loss"),
    *("train.loss_args.smoothing=0.1", "optim.schedule=user_tasks:fading"),
    *("optim.schedule_args.power=1.5", "train.callbacks=user_tasks:Watcher"),
)
# Samples in tar files, decoded by the rank that needs them.
SHARDS = (
    *(*BASE, *SHORT, "data.name=user_tasks:shards", "data.args.folder=SHARDS"),
    *("data.collate=user_tasks:decoded", "data.num_workers=1", "train.loss=next_token"),
    *("model.name=user_tasks:Net", "model.args.width=8"),
)
HUB = (
    *(*BASE, *SHORT, "data.name=user_tasks:hub", "data.pad=true", "train.loss=next_token"),
    *("model.name=user_tasks:Net", "model.args.width=8"),
)
# One tensor per sample, which a pipeline needs; a loss and a metric of each sample, and RAdam.
IMAGES = (
    *("digits", *BASE, *SHORT, "model.name=mlp", "train.loss=user_tasks:focal"),
    *("train.loss_args.gamma=1.5", "train.metrics=user_tasks:margin", "optim.name=RAdam"),
    *("optim.args.betas=[0.8, 0.9]", 'optim.groups={"*.bias": {weight_decay: 0, lr: 0.02}}'),
)


# Two types of weights; and a single weight, so that one of two ranks has no state of the optimizer.
PHASES = ("digits", *BASE, *SHORT, "model.name=user_tasks:Phases", "optim.ema=0.5")
LONE = (*PHASES, "model.args.has_order=false")


SMALL = ("model.hidden_size=16", "model.num_layers=2", "model.num_kv_heads=4")
# Rows of 4 to 12 tokens, up to four of which are one sequence.
PACKED = (
    *(*BASE, *SHORT, "data.pack=16", "data.global_batch=6", "data.micro_batch=2"),
    "train.loss=next_token",
)
# Weights to start from, of which some are not trained.
TUNED = (
    *(*BASE, *SHORT, "data.name=user_tasks:sentences", "data.pad=12", "train.loss=next_token"),
    *("model.name=user_tasks:Net", "model.args.width=8", "model.init=WEIGHTS/net.pt"),
    "model.freeze=embed*,up.bias",
)
LLAMA = (
    *("model.name=transformers", "model.args.base=llama", "model.args.hidden_size=16"),
    *("model.args.intermediate_size=32", "model.args.num_hidden_layers=2"),
    *("model.args.num_attention_heads=4", "model.args.num_key_value_heads=4"),
)
TEXT = (*BASE, *SHORT, "data.name=user_tasks:words", "data.pad=true", "train.loss=next_token")
VIT = (
    *("digits", *BASE, *SHORT, "model.name=transformers", "model.args.base=vit"),
    *("model.args.patch_size=2", "model.args.hidden_size=16", "model.args.num_hidden_layers=2"),
    *("model.args.num_attention_heads=4", "model.args.intermediate_size=32"),
    *("model.args.hidden_dropout_prob=0", "model.args.attention_probs_dropout_prob=0"),
)

TASKS = {
    "sentences": SENTENCES,
    "stream": STREAM,
    "images": IMAGES,
    "phases": PHASES,
    "lone": LONE,
    "returned": RETURNED,
    "shards": SHARDS,
    "hubmap": (*HUB, "data.args.kind=map"),
    "hubstream": (*HUB, "data.args.kind=stream"),
    "hubshuffled": (*HUB, "data.args.kind=shuffled"),
    "hubshards": (*HUB, "data.args.kind=shards"),
    "packed": (*PACKED, "data.name=user_tasks:words", "model.name=gpt", *SMALL),
    "packedstream": (*PACKED, "data.name=user_tasks:word_stream", "model.name=gpt", *SMALL),
    "tuned": TUNED,
    "llama": (*TEXT, *LLAMA),
    "packedllama": (*PACKED, "data.name=user_tasks:words", *LLAMA),
    "adapters": (*TEXT, *LLAMA, "model.args.lora={r: 2, target_modules: [q_proj, v_proj]}"),
    "vit": VIT,
}
PACKAGES = {
    **dict.fromkeys(("hubmap", "hubstream", "hubshuffled", "hubshards"), "datasets"),
    **dict.fromkeys(("llama", "packedllama", "vit"), "transformers"),
    "adapters": "peft",
}
"""What a task needs besides rollcall."""
APPLIES = {
    "images": ("ddp", "zero3", "pipeline"),
    "phases": ("ddp", "zero3"),
    "lone": ("ddp", "zero1"),
    **dict.fromkeys(
        ("shards", "hubstream", "hubshuffled", "hubshards", "adapters"), ("ddp", "zero3")
    ),
}
"""The strategies of a task in the whole table; other tasks have a plan for tensor parallelism."""


class Cell(NamedTuple):
    """A task under a strategy, which resumes another cell if it names one."""

    ranks: int
    strategy: str
    resumes: str = ""


CELLS = {
    "sentences-ddp": Cell(2, "ddp"),
    "sentences-zero3": Cell(4, "zero3"),
    "stream-zero3": Cell(4, "zero3"),
    "returned-ddp": Cell(2, "ddp"),
    "returned-zero3": Cell(4, "zero3"),
    "images-pipeline": Cell(2, "pipeline"),
    "sentences-tensor": Cell(2, "tensor", "sentences-zero3"),
    "stream-zero1": Cell(2, "zero1", "stream-zero3"),
    "returned-tensor": Cell(2, "tensor", "returned-zero3"),
    "shards-zero3": Cell(2, "zero3"),
    "shards-ddp": Cell(1, "ddp", "shards-zero3"),
    "hubmap-zero3": Cell(4, "zero3"),
    "hubmap-ddp": Cell(2, "ddp", "hubmap-zero3"),
    "hubstream-zero3": Cell(4, "zero3"),
    "hubstream-ddp": Cell(2, "ddp", "hubstream-zero3"),
    "hubshards-zero3": Cell(4, "zero3"),
    "hubshards-ddp": Cell(2, "ddp", "hubshards-zero3"),
    "hubshuffled-zero3": Cell(4, "zero3"),
    "hubshuffled-ddp": Cell(2, "ddp", "hubshuffled-zero3"),
    "images-zero3": Cell(2, "zero3", "images-pipeline"),
    "images-one": Cell(1, "zero3"),
    "phases-zero3": Cell(2, "zero3"),
    "lone-zero1": Cell(2, "zero1"),
    "lone-ddp": Cell(2, "ddp", "lone-zero1"),
    "packed-zero3": Cell(4, "zero3"),
    "packed-tensor": Cell(2, "tensor", "packed-zero3"),
    "packedstream-zero3": Cell(2, "zero3"),
    "packedstream-ddp": Cell(1, "ddp", "packedstream-zero3"),
    "tuned-zero3": Cell(2, "zero3"),
    "tuned-ddp": Cell(1, "ddp", "tuned-zero3"),
    "packedllama-zero3": Cell(4, "zero3"),
    "vit-zero3": Cell(4, "zero3"),
    "vit-tensor": Cell(2, "tensor", "vit-zero3"),
}


def whole_table() -> dict[str, Cell]:
    """Every task under every strategy on 1, 2 and 4 ranks, each resumed on another number."""
    found = {}
    for task in TASKS:
        strategies = APPLIES.get(task, ("ddp", "zero3", "tensor"))
        for place, strategy in enumerate(strategies):
            # The model of the pipeline has two layers.
            pairs = ((1, 2), (2, 1)) if "pipeline" in strategies else ((1, 2), (2, 4), (4, 1))
            for ranks, others in pairs:
                name = f"{task}-{strategy}-{ranks}"
                found[name] = Cell(ranks, strategy)
                following = strategies[(place + 1) % len(strategies)]
                found[f"{name}-{following}-{others}"] = Cell(others, following, name)
    return found


IS_WHOLE = "ROLLCALL_CONTRACT" in os.environ
QUICK = ("stream-zero3", "stream-zero1", "returned-ddp", "images-pipeline")
CELLS = whole_table() if IS_WHOLE else CELLS
WATCHED = "stream-zero3-4" if IS_WHOLE else "stream-zero3"  # its callback writes a line per step
SAVED, TOGETHER = 2, 20  # the step that others resume, and runs of one group of ranks


def can_run(name: str) -> bool:
    package = PACKAGES.get(name.partition("-")[0])
    return package is None or importlib.util.find_spec(package) is not None


def words_of(name: str, root: Path) -> list[str]:
    """The words of a task, by the name of its cell."""
    task = TASKS[name.partition("-")[0]]
    places = {"=SHARDS": f"={root / 'shards'}", "=WEIGHTS": f"={root}"}
    return [functools.reduce(lambda w, one: w.replace(*one), places.items(), word) for word in task]


@pytest.fixture(scope="module")
def done(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Job]:
    """The runs of the chosen tests, by name; `alone` and the name of a task is one process."""
    chosen = {
        item.callspec.params["name"] if hasattr(item, "callspec") else WATCHED
        for item in request.session.items
        if "done" in getattr(item, "fixturenames", ())
    }
    chosen |= {CELLS[name].resumes for name in chosen}
    cells = {name: cell for name, cell in CELLS.items() if name in chosen and can_run(name)}
    root = tmp_path_factory.mktemp("bring")
    user_tasks.write_shards(root / "shards")
    torch.manual_seed(1)
    torch.save(user_tasks.Net(8).state_dict(), root / "net.pt")
    # One process computes the loss of all rows itself, where the model would.
    same = ["parallel.strategy=single"]
    other = ["model.name=user_tasks:Net", "train.loss=next_token"]
    used = {name.partition("-")[0] for name in cells}
    alone = {
        f"alone-{name}": Job(
            root / name, [*words_of(name, root), *same, *other * (name == "returned")]
        )
        for name in used
    }
    rank_jobs.run([*alone.values()], root / "logs-1", 1, prepare=leave_out_operations)
    jobs = {
        name: Job(root / name, [*words_of(name, root), f"parallel.strategy={cell.strategy}"])
        for name, cell in cells.items()
    }
    for is_resumed, ranks in itertools.product((False, True), (1, 2, 4)):
        group = [
            name
            for name in jobs
            if CELLS[name].ranks == ranks and bool(CELLS[name].resumes) is is_resumed
        ]
        for name in group if is_resumed else []:
            saved = jobs[CELLS[name].resumes].run_dir.checkpoints / f"step-{SAVED:08d}"
            shutil.copytree(saved, jobs[name].run_dir.checkpoints / saved.name)
        for first in range(0, len(group), TOGETHER):
            logs = root / f"logs-{ranks}-{is_resumed}-{first}"
            some = [jobs[name] for name in group[first : first + TOGETHER]]
            rank_jobs.run(some, logs, ranks, prepare=leave_out_operations)
    return {**alone, **jobs}


@pytest.mark.timeout(7200 if IS_WHOLE else 600)
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in CELLS],
)
def test_equals_one_process(name: str, done: dict[str, Job]) -> None:
    if not can_run(name):
        pytest.skip(f"the package {PACKAGES[name.partition('-')[0]]} is not installed")
    alone = done[f"alone-{name.partition('-')[0]}"]
    first = SAVED if CELLS[name].resumes else 0
    assert done[name].losses() == pytest.approx(alone.losses()[first:], rel=TOLERANCE)
    [found], [expected] = (job.run_dir.read_events("evaluated") for job in (done[name], alone))
    for figure, value in expected.items():
        is_same = figure in found or "returned" not in name  # it has a loss alone
        if isinstance(value, float) and figure not in ("time", "seconds") and is_same:
            assert found[figure] == pytest.approx(value, rel=TOLERANCE), figure
    named = {"sentences": "second/Right_share", "stream": "right", "images": "margin"}
    assert named.get(name.partition("-")[0], "loss") in found


def test_a_callback_hears_of_every_step_on_every_rank(done: dict[str, Job]) -> None:
    directory = done[WATCHED].run_dir.path
    for rank in range(4):
        lines = (directory / f"watched-{rank}.txt").read_text().splitlines()
        settled = [line.split()[:2] for line in lines if "[" not in line]
        assert settled == [[str(step), "4"] for step in range(1, 6)], rank
        assert any("val_loss" in line for line in lines) is (rank == 0)


def test_ranks_read_the_shards_of_their_rows_alone(tmp_path: Path) -> None:
    """Stopped in the middle of an epoch on 1 and 4 ranks: each sample is seen once, by one rank."""
    words = [
        *(*BASE, *SHORT, "data.name=user_tasks:numbered", "data.collate=user_tasks:of_numbers"),
        *("data.global_batch=16", "train.steps=6", "checkpoint.every=1", "train.loss=next_token"),
        *("model.name=user_tasks:Net", "model.args.width=8"),
    ]

    def run(name: str, ranks: int, before: Job | None, step: int) -> Job:
        job = Job(tmp_path / name, [*words, f"data.args.log={tmp_path / name}-log"])
        if before:
            saved = before.run_dir.checkpoints / f"step-{step:08d}"
            shutil.copytree(saved, job.run_dir.checkpoints / saved.name)
        rank_jobs.run([job], tmp_path / f"{name}-out", ranks)
        return job

    whole = run("whole", 1, None, 0)
    four = run("four", 4, whole, 1)
    two = run("two", 2, four, 3)
    assert four.losses() == pytest.approx(whole.losses()[1:], rel=TOLERANCE)
    assert two.losses() == pytest.approx(whole.losses()[3:], rel=TOLERANCE)
    for name, ranks, first in (("four", 4, 1), ("two", 2, 3)):
        steps: list[list[int]] = [[] for _ in range(first, 6)]
        for rank in range(ranks):
            log = (tmp_path / f"{name}-log-{rank}").read_text().splitlines()
            # At the start every rank reads a few samples, to compare the data and build the model.
            seen = [[*map(int, line.split()[1:])] for line in log if line.startswith("seen")]
            rows = [line for line in seen if len(line) == 16 // ranks]
            for step, line in zip(steps, rows, strict=True):
                step += line
            share = 32 // ranks
            own = {*range(share * rank, share * (rank + 1))}
            assert {*itertools.chain(*rows)} == own, (name, rank)
            validated = (tmp_path / f"{name}-log-val-{rank}").read_text().splitlines()
            for lines, few in ((log, {0, 1, 4}), (validated, {0, 1})):
                read = {int(line.split()[1]) for line in lines if line.startswith("read")}
                assert own <= read and read - own <= few, (name, rank)
        epoch = [sorted(steps[at] + steps[at + 1]) for at in range(1, len(steps) - 1, 2)]
        assert epoch == [[*range(32)]] * len(epoch), name


def test_early_stopping_ends_the_run_as_done_and_keeps_the_best(tmp_path: Path) -> None:
    words = [
        *("digits", "device=cpu", "optim.lr=0.3", "optim.schedule=constant", "train.epochs=30"),
        *("train.evaluate_every=0.1", "train.stop_after=3", "train.stop_metric=accuracy"),
        *("checkpoint.keep_best=accuracy", "checkpoint.keep_last=1", "model.name=mlp"),
    ]
    job = Job(tmp_path, words)
    rank_jobs.run([job], tmp_path / "logs", 1)
    verdict = job.run_dir.read_verdict()
    assert verdict is not None and verdict.state == "done"
    assert verdict.reason.endswith("accuracy has not improved in 3 evaluations")
    values = [event["accuracy"] for event in job.run_dir.read_events("evaluated")]
    assert len(values) - 1 - values.index(max(values)) == 3
    best = job.run_dir.read_events("evaluated")[values.index(max(values))]["step"]
    saved = sorted(path.name for path in job.run_dir.checkpoints.iterdir())
    assert saved == sorted({f"step-{best:08d}", f"step-{verdict.step:08d}"})
    rank_jobs.run([job], tmp_path / "logs-again", 1)  # it stays done
    again = job.run_dir.read_verdict()
    assert again is not None and (again.state, again.step) == ("done", verdict.step)
    assert len(job.run_dir.read_events("evaluated")) == len(values)


def test_a_stream_without_a_state_and_a_loader_resume_too(tmp_path: Path) -> None:
    """Both begin again from the first sample and drop what was seen."""
    for name, more in (
        ("plain", ["data.name=user_tasks:stream", "data.args.kind=plain"]),
        ("loader", ["data.name=user_tasks:loader"]),
    ):
        words = [*BASE, *SHORT, "data.pad=12", "model.name=user_tasks:Net", *more]
        words += ["train.loss=next_token"]
        whole, again = (Job(tmp_path / f"{name}-{part}", words) for part in ("whole", "again"))
        rank_jobs.run([whole], tmp_path / f"logs-{name}", 1)
        saved = whole.run_dir.checkpoints / "step-00000004"
        shutil.copytree(saved, again.run_dir.checkpoints / saved.name)
        rank_jobs.run([again], tmp_path / f"logs-{name}-again", 1)
        assert again.losses() == whole.losses()[4:], name


def test_a_resumed_run_may_have_steps_without_a_target(tmp_path: Path) -> None:
    words = [*BASE, "train.steps=22", "data.name=user_tasks:sparse", "data.pad=12"]
    words += ["model.name=user_tasks:Net", "train.loss=next_token"]
    whole, again = (Job(tmp_path / part, words) for part in ("whole", "again"))
    rank_jobs.run([whole], tmp_path / "logs", 1)
    saved = whole.run_dir.checkpoints / "step-00000012"
    shutil.copytree(saved, again.run_dir.checkpoints / saved.name)
    rank_jobs.run([again], tmp_path / "logs-again", 1)
    losses = [[line.loss for line in job.run_dir.read_metrics()] for job in (whole, again)]
    assert losses[1] == losses[0][12:] == [0] * 10
