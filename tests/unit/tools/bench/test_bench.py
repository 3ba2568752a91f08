"""The parts that benchmarks share: turns, medians, ratios, and the end of a command."""

import itertools
import math
from random import Random

import psutil
import pytest

from rollcall.tools.bench import turns
from rollcall.tools.bench.__main__ import main


def test_ways_take_turns_and_each_measurement_is_shown_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = itertools.count(1)
    ways = {name: lambda _: {"clock": float(next(times))} for name in ("bare", "other")}
    found = turns.take_turns(ways, 3)
    assert found["bare"] == [{"clock": 1.0}, {"clock": 4.0}, {"clock": 5.0}]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "1 of 3: bare: clock 1" and len(lines) == 6
    turns.compare("title", found, "bare")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    bare, other = (["4", "s", "[1", "s,", "5", "s]"], ["3", "s", "[2", "s,"])
    assert rows[2:] == [
        ["bare", *bare, "1.00", "[1.00,", "1.00]"],
        ["other", *other, "6", "s]", "1.20", "[0.75,", "2.00]"],
    ], "the ratio is the median over the turns"


def test_the_interval_of_a_median_holds_it_in_95_of_100_samples() -> None:
    assert turns.interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    random = Random(0)
    for number in (6, 9, 25):
        drawn = [[random.expovariate(1) for _ in range(number)] for _ in range(2000)]
        held = sum(low < math.log(2) < high for low, high in map(turns.interval, drawn))
        assert 0.94 < held / 2000 < 0.99, number


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["spedup"], "unknown benchmark 'spedup', did you mean 'speedup'?"),
        ([], "expected the name of a benchmark"),
        (["speedup", "--ranks=0"], "expected a whole number of at least 1, not '0'"),
        (["speedup", "--ranks", "100000"], "100000 ranks"),
        (["overhead", "--strategy=zero3"], "--strategy zero3 needs --nproc-per-node 2"),
        (["checkpoint", "--megabytes=much"], "--megabytes: expected a whole number, got 'much'"),
        (["data", "--repeats=-1"], "expected a whole number of at least 1, not '-1'"),
    ],
)
def test_wrong_words_get_a_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(words)
    except SystemExit as end:  # of argparse
        code = int(end.code or 0)
    assert (code, said in capsys.readouterr().err) == (2, True)


def test_a_command_ends_with_its_children() -> None:
    with turns.started(["bash", "-c", "sleep 100 & sleep 100"]) as command:
        while len(left := psutil.Process(command.pid).children()) < 2:
            assert command.poll() is None
    gone, alive = psutil.wait_procs(left, timeout=10)
    assert len(gone) == 2 and not alive


def test_a_command_that_fails_says_what_it_printed() -> None:
    with pytest.raises(turns.BenchError, match=r"exit code 3: bash(.|\n)*no such thing"):
        turns.timed(["bash", "-c", "echo no such thing; exit 3"])
