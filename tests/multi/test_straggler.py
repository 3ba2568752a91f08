"""A rank that computes longer than the others is named, though all steps take equally long."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
from ranks import Ranks, logged_steps
from torch import nn

from rollcall.config.schema import Model
from rollcall.records.files import read_lines
from rollcall.run_dir import RunDir
from rollcall.train.data.source import Source

ROOT = Path(__file__).parents[2]
SECONDS = 0.05


class Slow(nn.Module):
    """A perceptron whose backward pass is slow on rank 1."""

    def __init__(self, _: Model, source: Source) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.out = nn.Linear(32, source.classes)
        if os.environ["RANK"] == "1":
            self.out.register_full_backward_hook(self._linger)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(torch.relu(self.hidden(x.flatten(1))))
        return out

    def _linger(self, *_: Any) -> None:
        time.sleep(SECONDS)


def test_a_slow_backward_pass_is_named(tmp_path: Path) -> None:
    words = ["digits", "model.name=test_straggler:Slow", "train.steps=65", "log.every=1"]
    words += ["train.evaluate_every=null", f"run.root={tmp_path}", "run.name=slow"]
    path = f"{Path(__file__).parent}:{ROOT / 'tests'}"
    ranks = Ranks(3, words, tmp_path / "logs", {"PYTHONPATH": path})
    assert ranks.wait() == [0] * 3, ranks.output()
    run_dir = RunDir(tmp_path, "slow")
    (told,) = [line for line in read_lines(run_dir.events) if line["event"] == "straggler"]
    assert (told["step"], told["rank"], told["host"]) == (60, 1, socket.gethostname())
    assert told["times"] > 2
    lines = logged_steps(run_dir)
    assert "slowest_rank" not in lines[18] and lines[-1]["slowest_rank"] == 1
    assert f"rank 1 on {told['host']} takes" in ranks.log(0).read_text()
