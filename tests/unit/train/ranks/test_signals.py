"""The signals that ask a rank to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from rollcall.train.ranks.signals import PERSON, SCHEDULER, StopSignals


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in PERSON | SCHEDULER}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", sorted(SCHEDULER))
def test_a_closed_terminal_asks_to_stop_as_slurm_does(number: signal.Signals) -> None:
    with StopSignals() as signals:
        os.kill(os.getpid(), number)
        assert signals.received == number


def test_nohup_keeps_a_run_from_being_stopped() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # as the supervisor does until ranks handle it
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.received is None
        os.kill(os.getpid(), signal.SIGUSR2)
        assert signals.received == signal.SIGUSR2
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
