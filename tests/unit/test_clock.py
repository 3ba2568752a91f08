"""The phases of a step add up to its wall clock."""

from types import SimpleNamespace

import pytest
import torch

from rollcall.train.dist import clock as module
from rollcall.train.dist.clock import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, Clock


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
