"""A rank that differs from rank 0 is named and refused before the first step."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ranks import Ranks
from torch import nn

from rollcall.config.schema import Model
from rollcall.train.data.source import Source
from rollcall.train.health.crosscheck import differences


def model_of_this_rank(_: Model, source: Source) -> nn.Module:
    width = 8 + (os.environ["RANK"] == "1")
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, source.classes))


def test_a_rank_with_another_model_is_named(tmp_path: Path) -> None:
    words = ["digits", f"model.name={__name__}:model_of_this_rank", f"run.root={tmp_path}/runs"]
    ranks = Ranks(2, words, tmp_path)
    assert ranks.wait() == [2, 2], ranks.output()
    (line,) = ranks.log(0).read_text().splitlines()
    host = socket.gethostname()
    assert f"error: rank 1 on {host} differs from rank 0 on {host}: model 1.weight is" in line
    assert "float32 (9, 64), not float32 (8, 64)" in line
    assert not (tmp_path / "runs").exists()


def test_code_is_compared_if_both_ranks_imported_it() -> None:
    main, mine = {"a": "1", "b": "2", "main": "3"}, {"a": "1", "b": "9", "mine": "3"}
    assert list(differences("code", main, mine)) == ["different code b"]
    assert list(differences("torch", "2.15.0", "2.11.0")) == ["torch is 2.11.0, not 2.15.0"]
    assert list(differences("configuration", {"a": 1}, {"b": None, "a": 1})) == []
