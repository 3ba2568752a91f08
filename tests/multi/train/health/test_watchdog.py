"""The watchdog ends a hung run and names the rank that the others wait for."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import Ranks, logged_steps
from torch import nn

from rollcall.config.schema import Model
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.train.data.source import Source
from rollcall.train.health.watchdog import Report, diagnose

WORDS = ["digits", "train.steps=100000", "log.every=1", "faults.hang_seconds=2"]
WORDS += ["train.evaluate_every=null", "checkpoint.every=null"]


class Stuck(nn.Module):
    """A layer that blocks rank 1 in its sixth forward pass of training."""

    def __init__(self, _: Model, source: Source) -> None:
        super().__init__()
        self.layer = nn.Linear(64, source.classes)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls == 6 and os.environ["RANK"] == "1":
            self.never_returns()
        out: torch.Tensor = self.layer(x.flatten(1))
        return out

    def never_returns(self) -> None:
        time.sleep(300)


def hang(
    root: Path, size: int, do: Callable[[Ranks, RunDir], None], *words: str
) -> tuple[str, Path]:
    """Train until the watchdog ends the run; return the verdict's reason and the reports."""
    run_dir = RunDir(root, "hung")
    ranks = Ranks(size, [*WORDS, *words, f"run.root={root}", "run.name=hung"], root / "logs")
    try:
        do(ranks, run_dir)
        ranks.processes[0].join(500)
        assert ranks.processes[0].exitcode == 1, ranks.output()
    finally:
        ranks.kill()
    verdict = run_dir.read_verdict()
    assert verdict is not None and verdict.state == "failed"
    assert verdict.reason in ranks.log(0).read_text().replace("\n", "")
    events = [line["event"] for line in read_lines(run_dir.events)]
    assert events.count("failed") == 1
    (reports,) = (run_dir.path / "hang").iterdir()
    return verdict.reason, reports


@pytest.mark.parametrize("words", [[], ["exact=true"]])
def test_the_rank_that_did_not_reach_the_collective_is_named(
    tmp_path: Path, words: list[str]
) -> None:
    words = [f"model.name={__name__}:Stuck", *words]
    reason, reports = hang(tmp_path, 2, lambda *_: None, *words)
    assert reason.startswith("hang after step ") and "no progress for " in reason
    assert "rank 1 on " in reason and "did not reach the collective" in reason
    assert "rank 0" not in reason
    assert "never_returns" in (reports / "rank-1.txt").read_text()
    assert "never_returns" not in (reports / "rank-0.txt").read_text()


def test_paths_of_files_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model below a folder `train/checkpoint` hangs while it computes, not while it saves."""
    folder = tmp_path / "train" / "checkpoint"
    folder.mkdir(parents=True)
    shutil.copy(__file__, folder / "stuck_model.py")
    monkeypatch.syspath_prepend(folder)  # the ranks get this path
    reason, reports = hang(tmp_path / "runs", 2, lambda *_: None, "model.name=stuck_model:Stuck")
    assert " was computing gradients after step " in reason and "did not reach" in reason
    assert str(folder) in (reports / "rank-1.txt").read_text()


@pytest.mark.long
def test_a_hang_ends_even_if_no_report_can_be_written(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "hung")
    run_dir.create()
    (run_dir.path / "hang").touch()  # a file where the directory of the reports should be
    words = [*WORDS, f"model.name={__name__}:Stuck", f"run.root={tmp_path}", "run.name=hung"]
    ranks = Ranks(2, words, tmp_path / "logs")
    assert ranks.wait() == [1, 1], ranks.output()
    verdict = run_dir.read_verdict()
    assert verdict is not None and "no rank could write a report" in verdict.reason


def test_a_frozen_rank_is_named(tmp_path: Path) -> None:
    def freeze(ranks: Ranks, run_dir: RunDir) -> None:
        deadline = time.monotonic() + 500
        while not logged_steps(run_dir)[4:]:
            assert time.monotonic() < deadline, ranks.output()
            time.sleep(0.05)
        os.kill(ranks.processes[1].pid or 0, signal.SIGSTOP)

    reason, reports = hang(tmp_path, 3, freeze)
    assert "rank 1 wrote no report: its process or its host is frozen" in reason
    assert {path.name for path in reports.glob("*.json")} == {"rank-0.json", "rank-2.json"}


def test_ranks_in_the_same_place_are_all_listed() -> None:
    reports = {rank: Report(rank, "n1", 7, 3, "reading data", {"0": 5}, 9.0) for rank in range(2)}
    text = diagnose(reports, 2)
    assert "same collectives" in text and "rank 0 on n1 was reading data after step 3" in text
