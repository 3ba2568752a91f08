"""The phases of a step add up to its wall clock, and a profile cannot end a run."""

import gzip
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollcall.train.dist import clock as module
from rollcall.train.dist.clock import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, Clock
from rollcall.train.profiling.profiler import Profiler


def test_phases_leave_out_only_what_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
    clock = Clock()
    clock.enter(DATA)  # before the first step
    now = 5.0
    with clock.running(torch.device("cpu")):
        for phase in (DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER):
            clock.enter(phase)
            now += 1
        clock.step()
        now += 2  # such as writing a line of metrics
        with clock.away():
            now += 100
            clock.enter(DATA)
            now += 100
        now += 1
        clock.step()
    now += 100
    steps, seconds = clock.totals()
    assert steps == 2
    assert seconds[DATA] == seconds[FORWARD] == seconds[BACKWARD] == seconds[OPTIMIZER] == 1
    assert seconds[OTHER] == 1 + 2 + 1
    assert clock.take()[0] == 2 and clock.take()[0] == 0


def test_half_a_trace_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = SimpleNamespace(world_size=1, rank=0, device=torch.device("cpu"))
    config = SimpleNamespace(profile=SimpleNamespace(steps=None, tool="torch"))
    run: Any = SimpleNamespace(
        config=config, world=world, run_dir=SimpleNamespace(path=tmp_path), say=print
    )
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", _cut_off)
    before = threading.active_count()
    profiler = Profiler(run, lambda: 0, 10)
    profiler.plan(1, 2)
    profiler.begin()
    profiler.close()
    assert "rank 0 could not write a profile" in capsys.readouterr().err
    assert threading.active_count() == before


def _cut_off(_: object, path: str) -> None:
    with gzip.open(path, "wt") as file:
        file.write('{"traceEvents": [')
