"""State that users' objects hold: trained, saved, restored, or named, as in a loop by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import user_state
from ranks import Ranks, logged_steps, train
from torch import nn
from user_state import WORDS

from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.train.weights.deferred import Draws

SAME = 1e-6
HALF, STEPS = 3, 6


def drawn(model: type[nn.Module]) -> nn.Module:
    with Draws(0):
        return model()


def losses(folder: Path, *attempts: tuple[int, str, int], words: list[str]) -> list[float]:
    """Train up to each number of steps on these ranks with this strategy; return all losses."""
    for number, (ranks, strategy, steps) in enumerate(attempts):
        more = [f"parallel.strategy={strategy}", f"train.steps={steps}", f"run.root={folder}"]
        train(ranks, [*WORDS, *words, *more, "run.name=run"], folder / f"logs-{number}")
    return [line["loss"] for line in logged_steps(RunDir(folder, "run"))]


@pytest.mark.parametrize(
    ("model", "loss", "attempts"),
    [
        ("Net", "Centers", [(1, "single", HALF), (2, "ddp", STEPS)]),
        ("Net", "Centers", [(2, "zero3", HALF), (1, "single", STEPS)]),
        ("Net", "OfModel", [(2, "zero1", HALF), (2, "zero2", STEPS)]),
        ("Rare", "Centers", [(3, "ddp", STEPS)]),
    ],
)
def test_a_loss_with_weights_trains_and_resumes(
    tmp_path: Path, model: str, loss: str, attempts: list[tuple[int, str, int]]
) -> None:
    words = [f"model.name=user_state:{model}", f"train.loss=user_state:{loss}"]
    words += ["data.micro_batch=4"]
    plain = drawn(getattr(user_state, model))
    expected = user_state.by_hand(plain, user_state.Centers(), STEPS)
    assert losses(tmp_path, *attempts, words=words) == pytest.approx(expected, rel=SAME)


def test_a_run_may_continue_with_a_loss_that_has_weights(tmp_path: Path) -> None:
    words = [*WORDS, "model.name=user_state:Net", f"run.root={tmp_path}", "run.name=run"]
    train(1, [*words, f"train.steps={HALF}"], tmp_path / "logs")
    words += ["train.loss=user_state:OfClasses", f"train.steps={STEPS}"]
    train(1, words, tmp_path / "logs-resumed")
    assert len(logged_steps(RunDir(tmp_path, "run"))) == STEPS


def test_a_pipeline_refuses_a_loss_with_weights(tmp_path: Path) -> None:
    words = ["model.name=user_state:Net", "train.loss=user_state:Centers", "train.steps=1"]
    ranks = Ranks(1, [*WORDS, *words, "parallel.strategy=pipeline"], tmp_path)
    assert ranks.wait() == [2]
    assert "train.loss=user_state:Centers has weights, which" in ranks.output()


@pytest.mark.parametrize("is_saved", [True, False])
def test_the_state_of_a_loss_is_saved_or_named(tmp_path: Path, is_saved: bool) -> None:
    words = ["model.name=user_state:Net", "train.loss=user_state:Running"]
    words += [f"train.loss_args.is_saved={is_saved}"]
    expected = user_state.by_hand(drawn(user_state.Net), user_state.Running(), STEPS)
    ours = losses(tmp_path, (1, "single", HALF), (1, "single", STEPS), words=words)
    assert (ours == pytest.approx(expected, rel=SAME)) == is_saved
    told = "training changes train.loss.mean, which no checkpoint holds"
    assert (told in (tmp_path / "logs-0" / "rank-0.log").read_text()) == (not is_saved)


def test_passes_before_the_first_step_leave_no_trace(tmp_path: Path) -> None:
    expected = user_state.by_hand(drawn(user_state.Annealed), user_state.cross_entropy, HALF)
    words = ["model.name=user_state:Annealed", "train.loss=user_state:cross_entropy"]
    ours = losses(tmp_path, (2, "ddp", HALF), words=words)
    assert ours == pytest.approx(expected, rel=SAME)
    assert "training changes model.calls, which" in (tmp_path / "logs-0/rank-0.log").read_text()


def test_callbacks_and_metrics_are_saved(tmp_path: Path) -> None:
    words = ["model.name=user_state:Net", "train.callbacks=user_state:Counting"]
    words += ["train.metrics=user_state:Evaluations", "train.evaluate_every=0.4"]
    losses(tmp_path, (2, "ddp", HALF), (1, "single", STEPS), words=words)
    assert "6 steps" in (tmp_path / "logs-1" / "rank-0.log").read_text()
    lines = [line for line in read_lines(RunDir(tmp_path, "run").metrics) if "val_loss" in line]
    # The evaluation at the end of the first attempt comes after its last save.
    counts = {line["step"]: line["val_Evaluations"] for line in lines}
    assert counts == {2: 1, 3: 2, 4: 2, 6: 3}


def test_a_callback_cannot_end_a_run_as_done(tmp_path: Path) -> None:
    words = ["model.name=user_state:Net", "train.callbacks=user_state:Exits", "run.name=run"]
    run = Ranks(1, [*WORDS, *words, f"run.root={tmp_path}"], tmp_path)
    assert run.wait() == [1]
    assert "a callback called sys.exit(0)" in run.output()
