"""A replica is lost, the others train on without it, and another process takes its place."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import lost_ranks
import psutil
import pytest
from lost_ranks import CONTINUE
from ranks import alone

from rollcall.config import ConfigError, parse
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines

STEPS = 400
LONG = pytest.mark.long


def undisturbed(root: Path, *words: str) -> RunDir:
    """Train in one process that no launcher has started."""
    words = (*lost_ranks.WORDS, *words, f"run.root={root}", "run.name=alone")
    process = alone([*words], root / "alone.log")
    process.join(lost_ranks.TIMEOUT)
    assert process.exitcode == 0, (root / "alone.log").read_text()
    return RunDir(root, "alone")


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ([3], []),
        pytest.param([0], ["checkpoint.every=3", "optim.ema=0.9"], marks=LONG, id="main, saving"),
        pytest.param([2, 2, 1], ["data.num_workers=1"], marks=LONG, id="one after the other"),
    ],
)
def test_the_others_go_on_and_the_rank_comes_back(
    tmp_path: Path, lost: list[int], words: list[str]
) -> None:
    words = [*words, f"train.steps={STEPS}"]
    with lost_ranks.submitted(tmp_path, "a", 2, 2, CONTINUE, *words) as (run, problem):
        for number, rank in enumerate(lost, 1):
            lost_ranks.await_step(run, 20 * number)
            when = lost_ranks.kill(run, rank)
            lost_ranks.await_ranks(run, 3, when)
            lost_ranks.await_ranks(run, 4, when)
        assert not problem()
    attempts = read_lines(run.job / "attempts.jsonl")
    assert [line["event"] for line in attempts] == ["started", "ended"]
    sizes = [line["world_size"] for line in run.read_events("started")]
    assert sizes == [4, *[3, 4] * len(lost)]
    steps = lost_ranks.steps_of(run)
    assert max(Counter(steps).values()) == 1
    assert len(steps) >= STEPS - 2 * len(lost)  # the loss of the newest step is not added up
    plain = undisturbed(tmp_path, *words)
    assert lost_ranks.gap(*(lost_ranks.weights(one, STEPS) for one in (run, plain))) < 1e-5
    losses = [{line.step: line.loss for line in one.read_metrics()} for one in (run, plain)]
    for step in losses[0]:
        assert losses[0][step] == pytest.approx(losses[1][step], rel=1e-4, abs=1e-6)


@LONG
def test_two_ranks_are_lost_at_once(tmp_path: Path) -> None:
    words = [CONTINUE, f"train.steps={STEPS}"]
    with lost_ranks.submitted(tmp_path, "a", 2, 2, *words) as (run, problem):
        lost_ranks.await_step(run, 20)
        when = max(lost_ranks.kill(run, rank) for rank in (1, 2))
        lost_ranks.await_ranks(run, 4, when)
        assert not problem()
    # All restart if the second one is lost while the others form a group without the first.
    assert len([*read_lines(run.job / "attempts.jsonl")]) in (2, 4)
    plain = undisturbed(tmp_path, words[1])
    assert lost_ranks.gap(*(lost_ranks.weights(one, STEPS) for one in (run, plain))) < 1e-5


@LONG
def test_all_ranks_restart_once_the_spare_processes_are_used_up(tmp_path: Path) -> None:
    words = [CONTINUE, f"train.steps={2 * STEPS}"]
    with lost_ranks.submitted(tmp_path, "a", 1, 2, *words) as (run, problem):
        for number in range(1, 5):
            lost_ranks.await_step(run, 20 * number)
            when = lost_ranks.kill(run, 1)
            lost_ranks.await_ranks(run, 2, when)
        assert not problem()
    ends = [line for line in read_lines(run.job / "attempts.jsonl") if line["event"] == "ended"]
    assert [line["state"] for line in ends] == ["failed", "finished"]
    assert [event["step"] for event in run.read_events("rescued")], "no step is repeated then"


@LONG
def test_dead_spare_processes_and_the_loss_of_all_ranks_at_once(tmp_path: Path) -> None:
    words = [CONTINUE, f"train.steps={2 * STEPS}"]
    with lost_ranks.submitted(tmp_path, "a", 1, 2, *words) as (run, problem):
        lost_ranks.await_step(run, 20)
        ranks = [psutil.Process(lost_ranks.pid_of(run, rank) or 0) for rank in (0, 1)]
        for process in psutil.Process(ranks[0].ppid()).children()[-2:]:  # of three spare ones
            process.kill()
        lost_ranks.await_ranks(run, 2, lost_ranks.kill(run, 1))
        lost_ranks.await_ranks(run, 2, max(lost_ranks.kill(run, rank) for rank in (0, 1)))
        assert not problem()
    sizes = [line["world_size"] for line in run.read_events("started")]
    assert sizes == [2, 1, 2, 2]


@pytest.mark.parametrize(
    "word", ["parallel.strategy=zero3", "exact=true", "parallel.mesh=replicate=2,shard=2"]
)
def test_other_ways_to_train_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="on_lost_rank"):
        parse(["digits", CONTINUE, word])
