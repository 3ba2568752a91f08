"""The phases of a step add up to its wall clock, and a profile cannot end a run."""

import errno
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollcall.records.profile import RankProfile
from rollcall.train.profiling.profiler import Profiler
from rollcall.train.ranks import clock as module
from rollcall.train.ranks.clock import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, Clock
from rollcall.train.ranks.run import Progress


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


def _run(folder: Path, steps: str | None = None, rank: int = 0) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(profile=SimpleNamespace(steps=steps, ranks="1", tool="torch")),
        world=SimpleNamespace(world_size=2, rank=rank, device=torch.device("cpu")),
        run_dir=SimpleNamespace(path=folder),
        say=print,
        progress=Progress(0, 40),
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_waits_on_all_ranks_for_the_configured_profile(tmp_path: Path, rank: int) -> None:
    run = _run(tmp_path, steps="3:23", rank=rank)
    profiler = Profiler(run)
    profiler.after_step()
    for step in range(30):
        run.progress.step = step
        if step == 8:
            profiler.plan(10, 12)
        profiler.after_step()
    spans = sorted(
        (profile.first, profile.last) for profile in RankProfile.read_all(tmp_path).values()
    )
    assert spans == [(3, 22), (23, 24)][1 - rank :]


def test_a_trace_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(tmp_path)
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", _fail)
    before = threading.active_count()
    profiler = Profiler(run)
    profiler.plan(1, 2)
    profiler.after_step()
    profiler.close()
    assert "rank 0 could not write a profile" in capsys.readouterr().err
    assert threading.active_count() == before


def _fail(_: object, path: str) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", path)
