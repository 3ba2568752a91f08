"""Networks that train in turn, as in a GAN: equal to a plain loop on any ranks, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import user_gan
from ranks import Ranks, logged_steps, train
from user_gan import WORDS

from rollcall.launch.runs import find
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.tools.report import page, story
from rollcall.train.checkpoint.tools import export
from rollcall.train.weights.deferred import Draws

STEPS, SAME = 10, 1e-6
CONDITIONAL = "parallel.conditional=critic.*"


def networks() -> user_gan.Networks:
    with Draws(0):
        return user_gan.Networks()


@pytest.mark.parametrize(
    "attempts",
    [
        [(1, "single", STEPS)],
        [(2, "ddp", 5), (1, "single", STEPS)],
        [(2, "zero3", 4), (3, "ddp", STEPS)],
        pytest.param([(2, "zero1", 5), (2, "zero2", STEPS)], marks=pytest.mark.long),
        pytest.param([(2, f"zero3 {CONDITIONAL}", STEPS)], marks=pytest.mark.long),
        pytest.param([(4, "ddp", 4), (4, "hsdp", 7), (2, "zero3", STEPS)], marks=pytest.mark.long),
    ],
)
def test_two_networks_train_as_in_a_plain_loop(
    tmp_path: Path, attempts: list[tuple[int, str, int]]
) -> None:
    for number, (ranks, strategy, steps) in enumerate(attempts):
        more = f"parallel.strategy={strategy} train.steps={steps} run.root={tmp_path}".split()
        train(ranks, [*WORDS, *more, "run.name=gan"], tmp_path / f"logs-{number}")
    run_dir = RunDir(tmp_path, "gan")
    expected, state = user_gan.by_hand(networks(), STEPS)
    lines = logged_steps(run_dir)
    assert [line["loss"] for line in lines] == pytest.approx(expected, rel=SAME)
    turns = ["loss_critic", "loss_critic", "loss_generator"] * STEPS
    for line, name in zip(lines, turns, strict=False):
        assert {key: line[key] for key in line if "loss_" in key} == {name: line["loss"]}
    saved = export.read(max(run_dir.checkpoints.iterdir()))
    for part, tensors in state.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(saved[part][name], tensor.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("zero2", marks=pytest.mark.long)])
def test_a_validation_that_a_resumed_run_repeats_changes_nothing(
    tmp_path: Path, strategy: str
) -> None:
    """It gathers weights, and no backward pass frees them before the first step."""
    words = [*WORDS, f"parallel.strategy={strategy}", "train.evaluate_every=0.8"]
    words += [f"run.root={tmp_path}", "run.name=gan"]
    train(2, [*words, "train.steps=4"], tmp_path / "logs")
    run_dir = RunDir(tmp_path, "gan")
    lines = run_dir.metrics.read_text().splitlines(keepends=True)
    run_dir.metrics.write_text("".join(line for line in lines if "val_loss" not in line))
    train(2, [*words, f"train.steps={STEPS}"], tmp_path / "more")
    expected, _ = user_gan.by_hand(networks(), STEPS)
    assert [line["loss"] for line in logged_steps(run_dir)] == pytest.approx(expected, rel=SAME)


def test_both_losses_and_images_are_in_the_report(tmp_path: Path) -> None:
    words = [*WORDS, "train.steps=6", "log.every=3", f"run.root={tmp_path}", "run.name=gan"]
    output = train(2, words, tmp_path / "logs")
    assert "  loss_critic " in output and "  loss_generator " in output
    run_dir = RunDir(tmp_path, "gan")
    losses, _ = user_gan.by_hand(networks(), 6)
    last = logged_steps(run_dir)[-1]
    assert last["loss_critic"] == pytest.approx(sum(losses[3:5]) / 2, rel=SAME)
    assert last["loss_generator"] == pytest.approx(losses[5], rel=SAME)
    [validation] = [line for line in read_lines(run_dir.metrics) if "val_loss" in line]
    both = validation["val_loss_critic"] + validation["val_loss_generator"]
    assert validation["val_loss"] == pytest.approx(both, rel=SAME)
    text = page.page(story.tell([find.find(str(run_dir.path), "")]))
    assert "Loss critic" in text and "Loss generator" in text
    assert "Images drawn after step 6" in text and "data:image/png;base64,iVBOR" in text


def test_a_skipped_step_changes_neither_network(tmp_path: Path) -> None:
    words = [*WORDS, "train.loss=user_gan:Broken", f"train.steps={STEPS}", f"run.root={tmp_path}"]
    output = train(1, [*words, "run.name=gan"], tmp_path / "logs")
    expected, _ = user_gan.by_hand(networks(), STEPS, user_gan.Broken())
    good = [loss for loss in expected if loss == loss]
    assert 0 < len(good) < STEPS
    lines = logged_steps(RunDir(tmp_path, "gan"))
    assert [line["loss"] for line in lines] == pytest.approx(good, rel=SAME)
    assert "was skipped: a loss that is not finite" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "train.loss=user_gan:Misspelt",
            "its turns name generater, but the parts of the model are",
        ),
        ("train.loss=user_gan:Forgetful", "expects a parameter turn and an attribute turns"),
        ("model.name=user_gan:Shared", "but 0 of them have the weight scale: put it into one of"),
        ("faults.spike_factor=3", "trains networks in turn: choose single, ddp or a zero strategy"),
        ("exact=true", "trains networks in turn: choose single, ddp or a zero strategy"),
        ("parallel.strategy=tensor", "trains networks in turn: choose single, ddp or a zero"),
    ],
)
def test_what_cannot_train_in_turn_is_refused(tmp_path: Path, words: str, message: str) -> None:
    count = 2 if "tensor" in words else 1
    run = Ranks(count, [*WORDS, words, "train.steps=1", f"run.root={tmp_path}"], tmp_path)
    assert run.wait() == [2] * count, run.output()
    assert message in run.output()
