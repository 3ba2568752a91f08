"""The parts that benchmarks share: turns, medians, ratios, and the end of a command."""

import itertools

import psutil
import pytest

from rollcall.bench import turns


def test_ways_take_turns_and_each_measurement_is_shown_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = itertools.count(1)
    ways = {name: lambda _: {"clock": float(next(times))} for name in ("bare", "other")}
    found = turns.take_turns(ways, 3)
    assert found["bare"] == [{"clock": 1.0}, {"clock": 3.0}, {"clock": 5.0}]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "1 of 3: bare: clock 1" and len(lines) == 6
    turns.compare("title", turns.medians(found), "bare")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[2:] == [["bare", "3.00", "s", "1.00"], ["other", "4.00", "s", "1.33"]]


def test_a_command_ends_with_its_children() -> None:
    with turns.started(["bash", "-c", "sleep 100 & sleep 100"]) as command:
        while len(left := psutil.Process(command.pid).children()) < 2:
            assert command.poll() is None
    gone, alive = psutil.wait_procs(left, timeout=10)
    assert len(gone) == 2 and not alive


def test_a_command_that_fails_says_what_it_printed() -> None:
    with pytest.raises(turns.BenchError, match=r"exit code 3: bash(.|\n)*no such thing"):
        turns.timed(["bash", "-c", "echo no such thing; exit 3"])
