"""Planted delays are named with their rank and phase, though all ranks take equally long.

PLANTS=all plants a delay in each of five phases of each of four ranks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks, logged_steps
from torch import nn

from rollcall.cli.installation import ROOT, TRAIN
from rollcall.config.schema import Data, Model
from rollcall.records.phases import Phases
from rollcall.records.run import noticed, read_events
from rollcall.records.run_dir import RunDir
from rollcall.train.data.source import Batch, InMemory, Source
from rollcall.train.profiling import phases, verdict
from rollcall.train.ranks.world import World

SECONDS = 0.05
STEPS = 30
"""Of each plant."""
RANKS, LEAKS = 4, 2
PLACES = ("data", "forward", "backward", "optimizer", "other")
EVERY = [(place, str(rank)) for place in PLACES for rank in range(RANKS)]
SOME = [("data", "3"), ("backward", "1"), ("optimizer", "0"), ("other", "2"), ("forward", "3")]
PLANTS = [*(EVERY if os.environ.get("PLANTS") == "all" else SOME), ("data", "all")]
LEAK = 5_000_000
"""Bytes that rank LEAKS keeps of each step."""
done = 0
kept: list[torch.Tensor] = []
if "RANK" in os.environ:  # this file is imported by the ranks
    phases.LINE_EVERY = 0.25


def linger(place: str) -> None:
    """Sleep if a delay is planted here, in this step, on this rank."""
    planted = PLANTS[min(done // STEPS, len(PLANTS) - 1)]
    if planted in ((place, os.environ["RANK"]), (place, "all")):
        time.sleep(SECONDS)


class Slow(nn.Module):
    def __init__(self, _: Model, source: Source) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.out = nn.Linear(32, source.classes)
        self.out.register_full_backward_hook(lambda *_: linger("backward"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        linger("forward")
        out: torch.Tensor = self.out(torch.relu(self.hidden(x.flatten(1))))
        return out


class SlowSamples(InMemory):
    def __getitems__(self, indices: list[int]) -> Batch:
        linger("data")
        return super().__getitems__(indices)


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        global done
        linger("optimizer")
        super().step(closure)
        done += 1
        if os.environ["RANK"] == str(LEAKS):
            kept.append(torch.ones(LEAK, dtype=torch.uint8))


class Between:
    """A callback that takes time between the passes of a step."""

    def settle(self, _step: int, _agreed: object) -> None:
        linger("other")


def samples(_: Data, _world: World) -> Source:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 64, generator=generator)
    train = SlowSamples(inputs, torch.zeros(4096, dtype=torch.int64))
    return Source(train, InMemory(inputs[:0], torch.zeros(0)), shape=(64,), classes=4)


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("tc"), reason="needs root and tc")
def test_a_slow_link_is_communication_that_nothing_hides(tmp_path: Path) -> None:
    slow = "ip link set lo up && tc qdisc add dev lo root tbf rate 100mbit burst 256kb latency 1s"
    words = [
        "digits",
        "model.name=mlp",
        "model.hidden_size=5000",
        "train.steps=12",
        "device=cpu",
        "run.name=link",
    ]
    words += [f"run.root={tmp_path}", "train.evaluate_every=null", "checkpoint.every=null"]
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", *TRAIN]
    lines = [
        "timeout",
        "--signal=INT",
        "90",
        "unshare",
        "--net",
        "sh",
        "-c",
        f'{slow} && exec "$@"',
        "sh",
        *start,
        *words,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(lines, check=True, timeout=500, env=env, cwd=ROOT)
    line = Phases.read(tmp_path / "link")[-1]
    sent = 2 * 4 * (64 * 5000 + 5000 * 11 + 10) / 12.5e6  # seconds, by two ranks over one link
    communication = min(line.phases["communication"])
    assert communication > 0.8 * sent, line
    own = [sum(line.phases[name][rank] for name in PLACES) for rank in range(2)]
    assert max(own) < communication, line


@pytest.mark.long
def test_a_delay_is_named_with_its_rank_and_phase(tmp_path: Path) -> None:
    steps = STEPS * len(PLANTS)
    words = [f"{key}={__name__}:{name}" for key, name in (
        ("model.name", "Slow"), ("data.name", "samples"), ("optim.name", "SlowSGD"),
        ("train.callbacks", "Between"),
    )]  # fmt: skip
    words += ["data.global_batch=16", f"train.steps={steps}", "log.every=1", "device=cpu"]
    words += ["parallel.check=off"]  # steps are counted, and the trial of an optimizer makes some
    words += ["train.evaluate_every=null", "checkpoint.every=null", f"run.root={tmp_path}"]
    env = {"PLANTS": os.environ.get("PLANTS", "")}
    ranks = Ranks(RANKS, [*words, "run.name=slow"], tmp_path / "logs", env)
    assert ranks.wait() == [0] * RANKS, ranks.output()
    run = RunDir(tmp_path, "slow")
    found = read_events(run.path, "straggler")
    for number, (place, rank) in enumerate(PLANTS[:-1]):
        span = range(number * STEPS + 1, (number + 1) * STEPS + 12)
        named = [(one["phase"], str(one["rank"])) for one in found if one["step"] in span]
        print(place, rank, named)
        assert (place, rank) in named
    slow = [one for one in found if one["seconds"] > SECONDS / 2]
    # On busy CPUs the rank with the leak is late where it fills new memory.
    slow = [one for one in slow if (one["phase"], one["rank"]) != ("optimizer", LEAKS)]
    planted = {*PLANTS[:-1]} - {("optimizer", str(LEAKS))}
    assert {(one["phase"], str(one["rank"])) for one in slow} >= planted
    first = next(one for one in slow if one["phase"] == "backward")
    assert first["seconds"] > SECONDS * 0.7, first
    # On a busy machine a window has few steps.
    assert verdict.IN_A_ROW <= first["late"] <= first["steps"], first
    assert f"rank {first['rank']} (" in first["text"] and "its data wait is normal" in first["text"]

    lines = Phases.read(run.path)
    assert lines[-1].step == steps and sum(line.steps for line in lines) >= steps - 1
    for line in lines:
        for one in range(RANKS):
            total = sum(line.phases[name][one] for name in Phases.PHASES)
            assert abs(total - line.seconds) < 2e-6
    whole = [line for line in lines if steps - STEPS + line.steps < line.step < steps]
    waits = [wait for line in whole for wait in line.phases["data"]]  # a slow reader on all ranks
    assert waits and min(waits) > SECONDS * 0.8, whole
    host = lines[-1].host
    assert host is not None and max(host) == host[LEAKS]
    assert logged_steps(run)[-1]["slowest_rank"] in range(RANKS)
    assert first["text"] in ranks.log(0).read_text()
    assert noticed(run.path) == [one["text"] for one in read_events(run.path) if "text" in one]
