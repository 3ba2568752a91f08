"""The arguments of a user's code: read from its source, checked, completed and shown."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollcall.config import ConfigError, arguments, explain, help, parse

MODULE = '''
from torch import nn
from helpers import Base as Renamed
from functools import cache

class Net(nn.Module):
    """A network.

    More about it.
    """
    def __init__(self, width: int, depth: int = 2, rates: "tuple[float, float]" = (0.1, 0.2),
                 act=nn.ReLU, mode: "Literal['a', 'b']" = "a", drop=0, *,
                 classes: "int | None" = None):
        pass

class Child(Renamed):
    pass

def net(config, source, width=8): ...
def old(_, _source): ...
def load(config, path: str): ...
def loss(prediction, truth, smoothing: float = 0.0): ...
def anything(**options): ...
@cache
def wrapped(width): ...
class F:
    """Made of its arguments alone."""
    def __init__(self, beta: float = 1.0): ...
    def __call__(self, outputs, targets): ...
def schedule(step, steps, power: float = 2.0): ...
'''


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "helpers.py").write_text("class Base:\n    def __init__(self, size=3): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("mine", "helpers"):
        sys.modules.pop(name, None)


NET = ("model.name=mine:Net", "model.args.width=64")


def test_defaults_are_completed_without_an_import(capsys: pytest.CaptureFixture[str]) -> None:
    _, config = parse([*NET, "train.metrics=mine:F", "optim.schedule=mine:schedule"])
    expected = {"width": 64, "depth": 2, "rates": [0.1, 0.2], "mode": "a", "drop": 0}
    assert config.model.args == {**expected, "classes": None}  # not `act`, which is code
    assert config.train.metrics["F"].args == {"beta": 1.0}
    assert config.optim.schedule_args == {"power": 2.0}
    assert parse(["model.name=mine:Child"])[1].model.args == {"size": 3}
    assert "mine" not in sys.modules
    assert explain.main(NET) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"model.args.width=64 # command line", "model.args.depth=2 # default"} <= {*shown}


def test_what_the_source_does_not_show_is_asked_of_the_code() -> None:
    _, config = parse(["model.name=mine:wrapped"])
    with pytest.raises(ConfigError, match=r"model\.args\.width: mine:wrapped needs this argument"):
        arguments.complete(config, arguments.inspected)


def test_help_shows_the_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert help.main(["--help", "mine:Net"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "mine:Net",
        "    A network.",
        "  width  (int; required)",
        "  depth  (int; default: 2)",
    ]
    assert "  act  (default: set in the code)" in lines
    assert help.main(["--help", "mine:nothing"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.name=mine:Net"], "model.args.width: mine:Net needs this argument"),
        (
            [*NET, "model.args.dept=3"],
            "model.args.dept: mine:Net has no argument 'dept', did you mean 'model.args.depth'?",
        ),
        (["model.name=mine:net", "model.args.x=1"], "'x'; it takes width"),
        (["model.name=mine:old", "model.args.x=1"], "'x'; it takes none"),
        (["model.name=mine:net", "model.args.source=1"], "rollcall passes 'source'"),
        (["model.name=mine:Net", "model.args.width=wide"], "expected an integer, got 'wide'"),
        ([*NET, "model.args.rates=[0.1]"], "model.args.rates: expected a further item, got"),
        ([*NET, "model.args.mode=c"], "expected 'a' or 'b', got 'c'"),
        (["data.name=mine:load"], "data.args.path: mine:load needs this argument"),
        (["data.name=mine:load", "data.args.path=3"], "data.args.path: expected text"),
        (["train.loss=mine:loss", "train.loss_args.smooth=1"], "train.loss_args.smoothing'?"),
        (["train.metrics={f: {name: 'mine:F', args: {b: 1}}}"], "train.metrics.f.args.b: mine:F"),
        (
            ["train.metrics=mine:F", "train.metrics.F.args.beta=x"],
            "metrics.F.args.beta: expected a number",
        ),
        ([*NET, "model.args.depth=true"], "model.args.depth: expected a number, got True"),
        (["optim.name=lion"], "choose sgd, adam, adamw, a class of torch.optim such as Muon"),
        (["optim.args.betta=[0.9, 0.95]"], "did you mean 'optim.args.betas'?"),
        (["optim.args.lr=1"], "rollcall passes 'lr' to adamw itself"),
        (["optim.schedule=cosin"], "optim.schedule: unknown 'cosin', did you mean 'cosine'?"),
        (["optim.schedule=cosine", "optim.schedule_args.x=1"], "cosine has no argument 'x'"),
    ],
)
def test_mistakes_are_refused_in_one_sentence(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(words)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_module_that_ends_the_program_is_refused(tmp_path: Path) -> None:
    """As a script does that parses its own command line when it is imported."""
    (tmp_path / "helpers.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(
        ConfigError, match=r"importing helpers fails at .*helpers\.py:2: SystemExit"
    ):
        arguments.inspected("helpers:Base")


def test_calls_receive_what_they_name() -> None:
    import torch

    given = {"config": "c", "source": "s"}
    assert arguments.call("model.name", "model.args", "mine:old", {}, **given) is None
    optimizer = arguments.call(
        "optim.name",
        "optim.args",
        "adamw",
        {"betas": [0.5, 0.6]},
        params=[torch.zeros(1, requires_grad=True)],
        lr=0.1,
        weight_decay=0.0,
    )
    assert optimizer.defaults["betas"] == (0.5, 0.6)  # as a tuple, which the annotation names
    assert optimizer.defaults["lr"] == 0.1
