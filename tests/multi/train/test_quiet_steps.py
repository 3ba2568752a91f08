"""Steps that share an exchange: they compute the same, and what they cost is counted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import user_code
from ranks import Ranks

from rollcall.cli.installation import ROOT, TRAIN, command
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.train.checkpoint.tools import export
from rollcall.train.data.order import Order

WORDS = ["data.name=user_code:numbered_samples", "data.global_batch=16", "device=cpu"]
WORDS += ["checkpoint.every=null", "train.evaluate_every=null", "run.name=run"]
QUIET = {"SPACING": "1000"}
"""No two steps are so far apart: there is no exchange unless a step needs one."""
TALKING = {"SPACING": "0"}
"""There is an exchange in each step."""
COUNTS = {
    (1, "single", "quiet"): {"calls": 90},
    (2, "ddp", "quiet"): {"calls": 96, "of Python": 300, "allreduce_": 1},
    (2, "ddp", "talking"): {"calls": 172, "of Python": 430, "allreduce_": 2},
    (2, "zero3", "quiet"): {
        **{"calls": 128, "allreduce_": 1},  # of the norm
        **{"_allgather_base_": 5, "_reduce_scatter_base_": 3},
    },
}
"""Of a step of the model `counted`: collectives exactly, and the most calls of rollcall's functions
and of all. A step of Lightning Fabric makes 244, looks for no fault and agrees on nothing."""
SYSTEM_CALLS = 2.0
"""The most of a quiet step on one rank, without workers that load data."""

IMPORTS = 4
"""The most modules that a forked rank imports itself: 2, one of `rollcall.cli` and one of rich."""
NOTE_IMPORTS = """
import os, sys

def note(event, args):
    if event == "import" and "RANK" in os.environ:  # which ranks have since their fork
        with open(f"{os.environ['IMPORTS']}.{os.environ['RANK']}", "a") as file:
            print(args[0], file=file)

sys.addaudithook(note)
"""


def run(root: Path, world_size: int, *words: str, env: dict[str, str]) -> RunDir:
    ranks = Ranks(world_size, [*WORDS, f"run.root={root}", *words], root / "logs", env)
    assert ranks.wait() == [0] * world_size, ranks.output()
    return RunDir(root, "run")


def weights(run_dir: RunDir) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = export.read(max(run_dir.checkpoints.glob("step-*")))["model"]
    return model


def events(run_dir: RunDir) -> list[dict[str, Any]]:
    """Return what happened to steps, without the times."""
    names = {"skipped", "out_of_memory", "unused_weights", "rolled_back"}
    lines = [line for line in read_lines(run_dir.events) if line["event"] in names]
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


@pytest.mark.parametrize(
    "words",
    [
        ["model.name=user_code:nan_output"],
        ["model.name=user_code:out_of_memory"],
        ["data.name=user_code:one_ignored", "model.name=user_code:healthy"],
        ["model.name=user_code:sometimes"],
    ],
)
def test_what_happens_to_a_step_does_not_depend_on_when_ranks_talk(
    tmp_path: Path, words: list[str]
) -> None:
    order = Order(user_code.SIZE, user_code.SIZE, 16, seed=0)
    steps = [order.samples(step, range(16))[0] for step in range(6)]
    assert user_code.BAD not in steps[0]  # there, all ranks ask each other anyway
    more = [*words, "train.steps=12", "parallel.strategy=ddp"]
    often = run(tmp_path / "often", 2, *more, "log.every=1", env={})
    rarely = run(tmp_path / "rarely", 2, *more, "log.every=100", env=QUIET)
    assert events(rarely) == events(often)
    for name, tensor in weights(often).items():
        assert torch.equal(weights(rarely)[name], tensor), name


@pytest.mark.parametrize(
    ("world_size", "strategy", "kind"),
    [pytest.param(*cell, marks=pytest.mark.long if "zero3" in cell else ()) for cell in COUNTS],
)
def test_a_step_costs_no_more_than_it_did(
    tmp_path: Path, world_size: int, strategy: str, kind: str
) -> None:
    words = ["model.name=user_code:counted", "train.steps=130", "log.every=1000"]
    spacing = QUIET if kind == "quiet" else TALKING
    env = {**spacing, "COUNTS": str(tmp_path / "counts")}
    run(tmp_path, world_size, *words, f"parallel.strategy={strategy}", env=env)
    for rank in range(world_size):
        found = json.loads((tmp_path / f"counts.{rank}").read_text())
        most = dict(COUNTS[world_size, strategy, kind])
        print(strategy, kind, rank, found)
        for name in ("calls", "of Python"):
            calls = found.pop(name)
            bound = most.pop(name, calls)
            assert bound / 2 < calls <= bound, name
        assert found == most


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")
def test_a_quiet_step_makes_no_system_calls(tmp_path: Path) -> None:
    words = ["model.name=user_code:counted", "train.steps=130", "log.every=1000"]
    trace = tmp_path / "trace"
    tests = str(Path(user_code.__file__).parent)
    env = {**os.environ, **QUIET, "PYTHONPATH": tests, "OMP_NUM_THREADS": "1"}
    strace = ["strace", "-f", "-o", str(trace), sys.executable, *TRAIN]
    subprocess.run([*strace, *WORDS, f"run.root={tmp_path}", *words], env=env, check=True)
    lines = [line.split(maxsplit=1) for line in trace.read_text().splitlines()]
    ends = [place for place, (_, call) in enumerate(lines) if '"/QUIET"' in call]
    [rank] = {lines[end][0] for end in ends}
    calls = [call for pid, call in lines[ends[0] + 1 : ends[1]] if pid == rank]
    kinds = Counter(call.split("(")[0] for call in calls)
    assert len(calls) / len(user_code.QUIET) <= SYSTEM_CALLS, kinds


@pytest.mark.long
def test_a_forked_rank_has_imported_almost_everything(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOTE_IMPORTS)
    env = {"PYTHONPATH": str(tmp_path), "IMPORTS": str(tmp_path / "imports")}
    words = ["digits", "device=cpu", "train.steps=3", f"run.root={tmp_path}", "run.name=run"]
    supervisor = [*command("supervise", "--nproc-per-node", "2"), "--", *TRAIN, *words]
    subprocess.run(supervisor, env={**os.environ, **env}, cwd=ROOT, check=True, timeout=500)
    for rank in range(2):
        found = (tmp_path / f"imports.{rank}").read_text().split()
        assert 0 < len(found) <= IMPORTS, found
        assert not [name for name in found if name.startswith("torch")], found
