"""Slow hosts and slow links are named from the rates between all pairs; the checks of accept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from rollcall.tools.accept import checks, request
from rollcall.train import network
from rollcall.train.network import agreed, firsts, main, measure, slow_parts
from rollcall.train.ranks.world import World

NAMES = ["a", "b", "c", "d"]


def rates(**slow: float) -> list[list[float]]:
    """Rates of 1 GB/s between all pairs, but for those given as from_to."""
    usual = [[0.0 if row == column else 1e9 for column in NAMES] for row in NAMES]
    for pair, rate in slow.items():
        source, target = pair.split("_")
        usual[NAMES.index(source)][NAMES.index(target)] = rate
    return usual


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, []),
        ({"a_c": 1e7}, ["slow link: a to c, 10 MB/s"]),
        ({"b_a": 1e7, "b_c": 1e7, "b_d": 1e7}, ["slow host: b sends 10 MB/s"]),
        ({"a_b": 1e7, "c_b": 1e7, "d_b": 1e7}, ["slow host: b receives 10 MB/s"]),
        ({"a_b": 6e8}, []),
    ],
)
def test_slow_parts_are_named(given: dict[str, float], expected: list[str]) -> None:
    assert slow_parts(rates(**given), NAMES) == expected


def test_a_link_is_named_only_if_three_measurements_agree() -> None:
    passing = iter([rates(a_c=1e7), rates(a_c=1e7), rates(b_a=1e7)])
    assert slow_parts(agreed(lambda: next(passing), NAMES), NAMES) == []
    assert not [*passing], "all three were needed"
    lasting = iter([rates(a_c=1e7), rates(a_c=2e7, b_a=1e7), rates(a_c=1e7)])
    assert slow_parts(agreed(lambda: next(lasting), NAMES), NAMES) == ["slow link: a to c, 20 MB/s"]
    quiet = iter([rates(), rates(a_c=1e7)])
    assert agreed(lambda: next(quiet), NAMES) == rates() and [*quiet], "one is enough"


def test_nodes_with_different_numbers_of_ranks_agree_on_who_measures() -> None:
    assert firsts([0, 0, 1, 0, 1, 2]) == [0, 1, 3]
    assert firsts([0, 1, 2]) == [0, 1, 2]


@pytest.mark.parametrize("count", [3, 4])
def test_a_host_with_half_of_all_links_is_named(count: int) -> None:
    """Its sending and receiving is slow: two thirds of the links of three hosts."""
    slow = {f"{one}_{other}": 2e8 for one in "abcd" for other in "abcd" if "b" in (one, other)}
    given = [row[:count] for row in rates(**{k: v for k, v in slow.items() if k != "b_b"})[:count]]
    expected = ["slow host: b sends 200 MB/s", "slow host: b receives 200 MB/s"]
    assert slow_parts(given, NAMES[:count]) == expected


def test_of_two_hosts_none_is_named() -> None:
    assert slow_parts([[0.0, 1e9], [1e6, 0.0]], ["a", "b"]) == []


def test_one_rank_measures_its_collectives_and_no_link() -> None:
    world = World.join("cpu")
    try:
        found = measure(world, [4096])
    finally:
        world.leave()
    assert (found["ranks"], found["backend"], found["links"]) == (1, "gloo", [[0.0]])
    assert [row["bytes"] for row in found["collectives"]] == [4096] * 4 and not found["slow"]
    assert found["busy"] in ([], [world.host])
    found["busy"] = ["n1"]
    assert network._lines(found)[-1].startswith("busy: n1; rates may be too low: ")


def test_what_the_ranks_cannot_do_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main(["--device=cpu"]) == 2
    finally:  # a command ends its process instead
        dist.destroy_process_group()
    assert "one rank has nobody to talk to" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        checks.main([str(tmp_path), "rollcall accept", "--device=tpu"])
    assert "expected one of auto, cpu, cuda; got 'tpu'" in capsys.readouterr().err


def test_accept_has_the_checks_that_can_be_asked_for_in_their_order() -> None:
    assert tuple(checks.CHECKS) == request.CHECKS
