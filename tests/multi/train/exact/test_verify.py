"""`rollcall verify` finds a planted difference and reports its place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import HELPERS, ROOT
from ranks import Ranks
from torch import nn

from rollcall.config.schema import Model
from rollcall.records.run_dir import RunDir
from rollcall.train.data.source import Source
from rollcall.train.exact import difference, verify

WORDS = ["exact=true", "log.fingerprints=true", "train.steps=6", "data.global_batch=16"]
WORDS += [f"model.name={__name__}:Planted", "train.evaluate_every=null"]


class Planted(nn.Module):
    """A perceptron that computes something different in step 5, as the variable PLANTED says.

    Its value is the kind of difference; "ranks" changes the weights only on two ranks.
    """

    def __init__(self, _: Model, source: Source) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 16)
        self.out = nn.Linear(16, source.classes)
        self.kind = os.environ.get("PLANTED")
        self.calls = 0
        self.shards = 8 // int(os.environ["WORLD_SIZE"])  # on this rank
        on_two_ranks = self.kind == "ranks" and self.shards == 4
        if self.kind == "weights" or on_two_ranks:
            self.register_full_backward_pre_hook(self._change)
        if self.kind == "gradients":
            self.out.weight.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: gradient * self._factor()
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        hidden = torch.relu(self.hidden(x.flatten(1)))
        out: torch.Tensor = self.out(hidden)
        return out * self._factor() if self.kind == "losses" else out

    def _factor(self) -> float:
        return 1.0 + 1e-4 * (self.calls == 4 * self.shards + 1)  # the first shard of step 5

    def _change(self, *_: Any) -> None:
        if self.calls > 4 * self.shards:
            with torch.no_grad():
                self.out.bias[0] += 1e-6


def run(root: Path, name: str, planted: str, *words: str) -> RunDir:
    place = [f"run.root={root}", f"run.name={name}"]
    env = {"PLANTED": planted}
    ranks = Ranks(1, ["digits", *WORDS, *words, *place], root / f"{name}.logs", env=env)
    assert ranks.wait() == [0], ranks.output()
    return RunDir(root, name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return run(tmp_path_factory.mktemp("plain"), "plain", "")


@pytest.mark.parametrize(
    ("planted", "words", "found", "cause"),
    [
        ("losses", [], "difference: the loss of virtual shard 0 in step 5 (1 of 8", "forward pass"),
        ("gradients", [], "the gradient of out.weight in step 5 (1 of 4", "backward pass"),
        ("weights", [], "the weights out.bias before step 5 (1 of 4", "clipping"),
        ("", ["seed=1"], "the weights hidden.weight before step 1 (4 of 4", "initialized"),
        ("", ["optim.lr=1e-2"], "before step 2", "learning rate"),
    ],
)
def test_a_planted_difference_is_named(
    tmp_path: Path, plain: RunDir, planted: str, words: list[str], found: str, cause: str
) -> None:
    other = run(tmp_path, "other", planted, *words)
    first = difference.first(plain, other)
    assert first and found in str(first) and cause in first.likely_cause
    assert difference.first(plain, plain) is None
    assert verify.main(["runs", str(plain.path), str(other.path)]) == 1


def test_existing_runs_are_compared(
    tmp_path: Path, plain: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    second = run(tmp_path, "second", "")
    assert verify.main(["runs", str(plain.path), str(second.path)]) == 0
    assert capsys.readouterr().out.split()[-1] == "equal"
    assert verify.main(["runs", str(plain.path), str(tmp_path)]) == 2
    assert "has no hash of the final weights" in capsys.readouterr().err
    second.record("finished", step=6, state="done")  # as without exact=true
    assert verify.main(["runs", str(plain.path), str(second.path)]) == 2


@pytest.mark.long
def test_the_command_reports_a_difference_and_fails(tmp_path: Path) -> None:
    command = [sys.executable, f"{ROOT}/env/bin/rollcall", "verify", "equal", "--ranks", "1,2"]
    done = subprocess.run(
        [*command, *WORDS, "run.name=planted"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{HELPERS}", "PLANTED": "ranks"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("uninterrupted ")]
    assert [row[1:3] for row in rows[:2]] == [["1", "6"], ["2", "6"]]
    assert rows[1][-2:] == ["NOT", "EQUAL"]
    assert "first difference: the weights out.bias before step 5 (1 of 4 differ)" in done.stdout
