"""Benchmarks that no page runs, as short as possible."""

from __future__ import annotations

import signal

import pytest
from checkout import SHORT_TEXT

from rollcall.cli.installation import TRAIN
from rollcall.tools.bench import __main__ as program
from rollcall.tools.bench import experts, overhead

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ("overhead --model transformer --steps 2", ("bare", "bare + all-reduce", "rollcall")),
        ("experts --ranks 2", ("dense", "plain torch", "experts, spread")),
    ],
)
def test_a_benchmark_prints_its_command_and_its_rows(
    words: str,
    rows: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(experts, "STEPS", 3)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert program.main([*words.split(), "--repeats=1"]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"$ rollcall bench {words} --repeats=1"
    for row in rows:
        assert any(line.startswith(row) for line in lines), lines


def test_the_check_before_the_first_step_is_timed_under_each_strategy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With few samples, since here only the table counts."""
    monkeypatch.setattr(overhead, "BATCH", 2)
    monkeypatch.setattr(overhead, "TRAIN", (*TRAIN, SHORT_TEXT))
    assert overhead.main(["--first", "--repeats=1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    for strategy in ("ddp", "zero3", "tensor"):
        assert any(line.startswith(strategy) for line in shown), shown
