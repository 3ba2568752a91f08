"""Jobs on simulated hosts, with the launcher's own code; see simulation.py.

A failing seed prints its story. To repeat one alone, and see it again:
PYTHONPATH=.:tests/simulation ./env/run python tests/campaigns/simulate.py --first SEED --seeds 1
"""

from __future__ import annotations

import pytest
from simulated_hosts import Fault
from simulation import Scenario, Simulation, simulate

SEEDS = 60
"""Seeds of each run of the tests; the campaign takes thousands."""
KEPT = {
    74: "a loss noticed while a round failed was forgotten, and noticed 30 s later",
    127: "a node that had been frozen reported a peer that had left, which ended the next step",
    150: "a head that had been frozen started its ranks again beside the next step",
    227: "a second dead host was not asked after a loss, and cost five minutes",
    1037: "all nodes of a step died, and the spare hosts waited for the time limit",
    1472: "a node whose host was frozen blamed the node that had left because of it",
    2086: "a batch process stood aside for ever, for a successor that had died before it began",
    2177: "a head that died before its first heartbeat had no successor",
    2673: "a host that had been frozen was used again while its last step still ran there",
}
"""Seeds that broke an invariant once, and the defect that they found."""
OF_SIX = {
    40147: "no defect: a frozen node had written its end before the next step began there",
    11046: "a head that the job went on without requeued it",
    41446: "a rank 0 that had stood still before its claim took the run from the next attempt",
}
"""The same, of jobs with up to six nodes."""


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(20, SEEDS, 20))]
)
def test_faults_break_no_invariant(first: int) -> None:
    broken = [result for seed in range(first, first + 20) if (result := simulate(seed)).broken]
    assert not broken, "\n".join(broken[0].story)


@pytest.mark.parametrize("seed", KEPT)
def test_a_mended_defect_stays_mended(seed: int) -> None:
    result = simulate(seed)
    assert not result.broken, "\n".join(result.story)


@pytest.mark.parametrize("seed", OF_SIX)
def test_a_mended_defect_of_up_to_six_nodes_stays_mended(seed: int) -> None:
    result = simulate(seed, 2, 6)
    assert not result.broken, "\n".join(result.story)


def test_a_seed_repeats_a_run_exactly() -> None:
    first, second = (simulate(3) for _ in range(2))
    assert (first.story, first.events) == (second.story, second.events)
    assert first.operations == second.operations
    assert len(first.story) <= 20


@pytest.mark.parametrize("when", [60.0, pytest.param(200.0, marks=pytest.mark.long)])
def test_a_step_that_stood_still_is_fenced_off_by_the_one_on_a_spare_host(when: float) -> None:
    stories = []
    for seed in range(6):
        fault = Fault(when, "freeze", 0, r"\bn0\b", 150.0)
        result = Simulation(Scenario(seed, 1, 1, None, 395, [fault])).go()
        assert not result.broken, "\n".join(result.story)
        assert result.end == "done"
        stories += result.story
    assert any("starts on n1" in line for line in stories)
    assert any("gave way" in line for line in stories) or when > 60, "it ended with its last step"


def test_a_claim_of_a_host_that_dies_at_once_passes_to_the_next_one() -> None:
    first = Simulation(Scenario(1, 3, 0, 1, 200, [Fault(20.0, "power-off", 0, r"\bn0\b")]))
    first.go()
    host = next(process.host for process, number in first.numbers.items() if number == 1)
    dies = Fault(first.claimed[0] + 0.01, "power-off", host.number, rf"\b{host.name}\b")
    faults = [Fault(20.0, "power-off", 0, r"\bn0\b"), dies]
    result = Simulation(Scenario(1, 3, 0, 1, 200, faults)).go()
    assert not result.broken, "\n".join(result.story)
    assert result.end == "done", "\n".join(result.story)


def test_a_spare_host_waits_while_a_node_of_the_step_lives() -> None:
    full = Fault(60.0, "full", 0, r"\bn0\b", 150.0)  # the batch process cannot count there
    result = Simulation(Scenario(1, 2, 1, None, 500, [full])).go()
    assert not result.broken, "\n".join(result.story)
    assert result.end == "done"
    assert sum(" starts on " in line for line in result.story) == 1, "\n".join(result.story)


def test_a_batch_process_that_was_replaced_takes_over_again() -> None:
    frozen = Fault(20.0, "freeze", 0, r"\bn0\b", 60.0)
    faults = [frozen, Fault(76.0, "power-off", 1, r"\bn1\b")]
    result = Simulation(Scenario(1, 2, 0, 1, 200, faults)).go()
    assert not result.broken, "\n".join(result.story)
    assert result.end == "done", "\n".join(result.story)
    starts = [line.split(" on ")[1] for line in result.story if " starts on " in line]
    assert starts == ["n0, n1", "n1", "n0"]


@pytest.mark.parametrize("nodes", [2, pytest.param(40, marks=pytest.mark.long)])
def test_the_death_of_a_node_is_noticed_as_soon_in_a_large_job(nodes: int) -> None:
    fault = Fault(60.0, "power-off", nodes - 1, rf"\bn{nodes - 1}\b")
    result = Simulation(Scenario(1, nodes, 0, None, 400, [fault])).go()
    assert not result.broken, "\n".join(result.story)
    assert 30 <= result.noticed[0] <= 36


@pytest.mark.long
def test_a_quiet_node_loads_the_file_system_as_little_in_a_large_job() -> None:
    for nodes in (4, 40):
        result = Simulation(Scenario(1, nodes, 0, None, 140, [])).go()
        assert not result.broken
        quiet = [
            count
            for (second, host, call), count in result.operations.items()
            if 40 <= second < 60 and host > 0 and call not in ("read", "write")
        ]
        assert sum(quiet) / (nodes - 1) / 20 <= 1.0
