"""Profiles of chosen steps and ranks: from the configuration, and of a live run."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest
from ranks import Ranks

from rollcall.config import ConfigError, parse
from rollcall.launch.commands import profile
from rollcall.launch.runs.find import NoRunError
from rollcall.messages.refusal import RefusedError
from rollcall.records.phases import Phases
from rollcall.records.profile import RankProfile
from rollcall.records.run import read_events
from rollcall.records.run_dir import RunDir

WORDS = [
    "digits",
    "model.name=mlp",
    "model.hidden_size=64",
    "device=cpu",
    "checkpoint.every=null",
    "run.name=run",
]


def test_steps_of_a_run_are_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, f"run.root={tmp_path}", "train.epochs=2000"]
    ranks = Ranks(2, [*words, "profile.steps=3:23", "profile.ranks=1"], tmp_path / "logs")
    run = RunDir(tmp_path, "run")
    end = time.monotonic() + 500
    while not read_events(run.path, "first_step"):
        assert time.monotonic() < end, ranks.output()
        time.sleep(0.1)
    with pytest.raises(RefusedError, match="expected all, or ranks up to 1 as in 0,1"):
        profile.main(["--root", str(tmp_path), "run", "--ranks", "0,2"])
    with pytest.raises(RefusedError, match="expected a number from 1 to 1000"):
        profile.main(["--root", str(tmp_path), "run", "--steps", "0"])
    asked = ["--root", str(tmp_path), "run", "--ranks", "all", "--steps", "2"]
    assert profile.main([*asked, "--wait", "60"]) == 0, ranks.output()
    shown = capsys.readouterr().out
    assert shown.count("communication that nothing hid") == 2 and "aten::" in shown
    for process in ranks.processes:
        process.terminate()
    ranks.wait()

    chosen = RankProfile.read(run.path, first=3, last=22, rank=1)
    assert chosen is not None and RankProfile.read(run.path, first=3, last=22, rank=0) is None
    assert abs(sum(chosen.phases.values()) - chosen.seconds) < 0.01 * chosen.seconds + 1e-4
    assert "all_reduce" in chosen.operators or "allreduce" in chosen.operators
    folder = RankProfile.path_in(run.path, first=3, last=22, rank=1).parent
    assert {*chosen.files} == {path.name for path in folder.iterdir()} - {"rank-1.json"}
    with gzip.open(folder / "trace-1.json.gz") as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert {*Phases.PHASES} <= names

    with pytest.raises(NoRunError, match=r"is not running: \w+; to profile"):
        profile.main(["--root", str(tmp_path), "run"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["profile.steps=13:10"], "profile.steps=13:10: expected FIRST:END with END after FIRST"),
        (["profile.steps=0:3"], "counted from 1"),
        (["profile.steps=ten"], "profile.steps=ten: expected FIRST:END"),
        (["profile.steps=1:3", "profile.ranks=0,x"], "profile.ranks=0,x: expected all, or"),
        (["profile.ranks=1"], "profile.ranks is an option of profile.steps"),
    ],
)
def test_a_wrong_profile_is_refused(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse([*WORDS, *words])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["profile.steps=1:3", "profile.ranks=0,7"],
            "rank 7 does not exist; expected ranks from 0",
        ),
        (["profile.steps=100:103", "train.steps=9"], "at most 1000 of the steps 1 to 9"),
        (["profile.steps=1:3", "profile.tool=nsight"], "profile.tool=nsight needs GPUs"),
    ],
)
def test_a_profile_that_does_not_fit_leaves_nothing(
    tmp_path: Path, words: list[str], expected: str
) -> None:
    ranks = Ranks(1, [*WORDS, f"run.root={tmp_path}", *words], tmp_path / "logs")
    assert ranks.wait() == [2], ranks.output()
    assert expected in ranks.output() and not (tmp_path / "run").exists()
