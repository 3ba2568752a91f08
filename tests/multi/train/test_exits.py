"""Code of a user that calls sys.exit() ends the run as failed on every rank, wherever it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks
from user_state import WORDS

from rollcall.records.run_dir import RunDir

CALLBACK = "train.callbacks.x=user_exits:Callback"
CASES = {
    "data": ["data.args.where=function"],
    "first-sample": ["data.args.where=training"],
    "first-sample-in-a-worker": ["data.args.where=training", "data.num_workers=1"],
    "evaluation": ["data.args.where=validation", "data.num_workers=0"],
    "model": ["model.args.where=making"],
    "check": ["model.args.step=1"],
    "loss": ["train.loss=user_exits:loss"],
    "callback": [CALLBACK, "train.callbacks.x.args.where=making"],
    "callback-of-a-step": [CALLBACK, "train.callbacks.x.args.where=step"],
    "callback-at-the-end": [CALLBACK, "train.callbacks.x.args.where=closing"],
}


@pytest.mark.parametrize("case", CASES)
def test_no_call_of_exit_ends_a_run_as_done(tmp_path: Path, case: str) -> None:
    words = [*WORDS, "model.name=user_exits:Net", "data.name=user_exits:data", "train.steps=6"]
    words = [word for word in words if word != "data.name=user_state:vectors"]
    run = Ranks(2, [*words, *CASES[case], f"run.root={tmp_path}", "run.name=run"], tmp_path)
    codes = run.wait()
    assert 0 not in codes, run.output()
    text = "data, a model or a callback called sys.exit(None); raise an exception"
    assert text in run.output() or "data: SystemExit: no reason given" in run.output()
    verdict = RunDir(tmp_path, "run").read_verdict()
    assert verdict is None or verdict.state == "failed"


@pytest.mark.parametrize("answer", ["word", "number"])
def test_a_callback_that_answers_with_something_else_is_named(tmp_path: Path, answer: str) -> None:
    words = [*WORDS, "model.name=user_state:Net", CALLBACK, "train.steps=6", f"run.root={tmp_path}"]
    run = Ranks(2, [*words, f"train.callbacks.x.args.where={answer}"], tmp_path / "logs")
    assert run.wait() == [2, 2]
    text = "rollcall: error: train.callbacks.x: expected settle() to return an Action, got"
    assert run.output().count(text) == 1
