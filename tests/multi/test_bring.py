"""Code that users bring equals one process under the strategies, and resumes on other ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from rollcall.train import matrix
from rollcall.train.matrix import Job

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
# A stream of 23 samples that begins again in step 3, read by a worker; a loss of model and batch;
# a schedule and a member of the step.
STREAM = (
    *(*BASE, *SHORT, "data.name=user_tasks:stream", "data.pad=true", "data.num_workers=2"),
    *("model.name=user_tasks:Net", "model.args.width=8", "train.loss=user_tasks:loss"),
    *("train.loss_args.smoothing=0.1", "optim.schedule=user_tasks:fading"),
    *("optim.schedule_args.power=1.5", "train.callbacks=user_tasks:Watcher"),
)
# One tensor per sample, which a pipeline needs; a loss and a metric of each sample, and RAdam.
IMAGES = (
    *("digits", *BASE, *SHORT, "model.name=mlp", "train.loss=user_tasks:focal"),
    *("train.loss_args.gamma=1.5", "train.metrics=user_tasks:margin", "optim.name=RAdam"),
    *("optim.args.betas=[0.8, 0.9]", 'optim.groups={"*.bias": {weight_decay: 0, lr: 0.02}}'),
)


class Cell(NamedTuple):
    """A task under a strategy, which resumes another cell if it names one."""

    task: tuple[str, ...]
    ranks: int
    strategy: str
    resumes: str = ""


CELLS = {
    "sentences-ddp": Cell(SENTENCES, 2, "ddp"),
    "sentences-zero3": Cell(SENTENCES, 4, "zero3"),
    "stream-zero3": Cell(STREAM, 4, "zero3"),
    "images-pipeline": Cell(IMAGES, 2, "pipeline"),
    "sentences-tensor": Cell(SENTENCES, 2, "tensor", "sentences-zero3"),
    "stream-zero1": Cell(STREAM, 2, "zero1", "stream-zero3"),
    "images-zero3": Cell(IMAGES, 2, "zero3", "images-pipeline"),
}
SAVED = 2


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """All runs, by name; `alone` and the name of a task is one process."""
    root = tmp_path_factory.mktemp("bring")
    alone = {
        f"alone-{name}": Job(root / name, [*task, "parallel.strategy=single"])
        for name, task in (("sentences", SENTENCES), ("stream", STREAM), ("images", IMAGES))
    }
    matrix.run([*alone.values()], root / "logs-1", 1)
    jobs = {
        name: Job(root / name, [*cell.task, f"parallel.strategy={cell.strategy}"])
        for name, cell in CELLS.items()
    }
    for is_resumed in (False, True):
        for ranks in (2, 4):
            group = [
                name
                for name, cell in CELLS.items()
                if cell.ranks == ranks and bool(cell.resumes) is is_resumed
            ]
            for name in group if is_resumed else []:
                saved = jobs[CELLS[name].resumes].run_dir.checkpoints / f"step-{SAVED:08d}"
                shutil.copytree(saved, jobs[name].run_dir.checkpoints / saved.name)
            if group:
                logs = root / f"logs-{ranks}-{is_resumed}"
                matrix.run([jobs[name] for name in group], logs, ranks)
    return {**alone, **jobs}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CELLS)
def test_equals_one_process(name: str, done: dict[str, Job]) -> None:
    alone = done[f"alone-{name.partition('-')[0]}"]
    first = SAVED if CELLS[name].resumes else 0
    assert done[name].losses() == pytest.approx(alone.losses()[first:], rel=TOLERANCE)
    [found], [expected] = (job.run_dir.read_events("evaluated") for job in (done[name], alone))
    for figure, value in expected.items():
        if isinstance(value, float) and figure != "time":
            assert found[figure] == pytest.approx(value, rel=TOLERANCE), figure
    named = {"sentences": "second/Right_share", "stream": "right", "images": "margin"}
    assert named[name.partition("-")[0]] in found


def test_a_callback_hears_of_every_step_on_every_rank(done: dict[str, Job]) -> None:
    directory = done["stream-zero3"].run_dir.path
    for rank in range(4):
        lines = (directory / f"watched-{rank}.txt").read_text().splitlines()
        settled = [line.split()[:2] for line in lines if "[" not in line]
        assert settled == [[str(step), "4"] for step in range(1, 6)], rank
        assert any("val_loss" in line for line in lines) is (rank == 0)


def test_early_stopping_ends_the_run_as_done_and_keeps_the_best(tmp_path: Path) -> None:
    words = [
        *("digits", "device=cpu", "optim.lr=0.3", "optim.schedule=constant", "train.epochs=30"),
        *("train.evaluate_every=0.1", "train.stop_after=3", "train.stop_metric=accuracy"),
        *("checkpoint.keep_best=accuracy", "checkpoint.keep_last=1", "model.name=mlp"),
    ]
    job = Job(tmp_path, words)
    matrix.run([job], tmp_path / "logs", 1)
    verdict = job.run_dir.read_verdict()
    assert verdict is not None and verdict.state == "done"
    assert verdict.reason.endswith("accuracy has not improved in 3 evaluations")
    values = [event["accuracy"] for event in job.run_dir.read_events("evaluated")]
    assert len(values) - 1 - values.index(max(values)) == 3
    best = job.run_dir.read_events("evaluated")[values.index(max(values))]["step"]
    saved = sorted(path.name for path in job.run_dir.checkpoints.iterdir())
    assert saved == sorted({f"step-{best:08d}", f"step-{verdict.step:08d}"})
    matrix.run([job], tmp_path / "logs-again", 1)  # it stays done
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
        matrix.run([whole], tmp_path / f"logs-{name}", 1)
        saved = whole.run_dir.checkpoints / "step-00000004"
        shutil.copytree(saved, again.run_dir.checkpoints / saved.name)
        matrix.run([again], tmp_path / f"logs-{name}-again", 1)
        assert again.losses() == whole.losses()[4:], name
