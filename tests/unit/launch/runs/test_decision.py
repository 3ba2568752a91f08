"""The table by which rollcall decides what follows when a run comes down."""

from __future__ import annotations

import ast
import inspect
import itertools
from dataclasses import fields

import pytest
from checkout import ROOT

from rollcall.launch.runs import decision
from rollcall.launch.runs.decision import TABLE, RestartFacts, Rule, decide
from rollcall.records.run import State

FACTS = [field.name for field in fields(RestartFacts)]
STARTS = ("ranks run", "attempt runs", "step runs", "finished", "stopped", "failed")
"""States that follow from what happens, not from a row."""


@pytest.mark.parametrize("rule", TABLE, ids=lambda rule: f"{rule.state}, {rule.event}")
def test_every_row_can_decide(rule: Rule) -> None:
    assert {*rule.facts} <= {*FACTS}
    facts = RestartFacts(**dict.fromkeys(rule.facts, True))
    assert decide(rule.state, rule.event, facts) == rule, "a row above it hides it"
    assert not decide(rule.state, rule.event).facts, "no row applies if no fact holds"


def test_states_follow_from_each_other() -> None:
    states = {rule.state for rule in TABLE}
    following = {rule.next for rule in TABLE}
    assert following - states == {"over"}
    assert states <= following | {*STARTS}


def test_every_row_is_asked_for() -> None:
    """The table says what the code does: for each state and event, a process looks up the row."""
    asked = set()
    for path in (ROOT / "rollcall" / "launch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "decide":
                words = [getattr(word, "value", None) for word in node.args[:2]]
                asked.add(tuple(word if isinstance(word, str) else None for word in words))
    for rule in TABLE:
        pairs = ((rule.state, rule.event), (rule.state, None), (None, rule.event))
        assert asked & {*pairs}, rule


def test_nothing_but_the_facts_decides() -> None:
    """The module reaches no clock, file, process, socket or thread: a simulator can run it."""
    modules: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(inspect.getsource(decision))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names}
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            modules[module] = modules.get(module, set()) | names
    assert (modules.pop(""), modules.pop("os")) == ({"re"}, {"EX_TEMPFAIL"})
    records = {f"rollcall.records.{name}" for name in ("attempt", "job", "run")}
    assert modules.keys() == {"collections.abc", "dataclasses", "typing", *records}


def test_a_request_to_stop_never_starts_ranks_again() -> None:
    """Whatever else is known, a run that was asked to stop gets no new attempt in its job."""
    others = ("not_head", "node_lost", "leaves", "used_up", "permanent", "in_vain")
    for size in range(len(others) + 1):
        for some in itertools.combinations(others, size):
            rule = decide(
                "failed", "ranks ended", RestartFacts(asked=True, **dict.fromkeys(some, True))
            )
            assert rule.action in ("leave", "wait for the head", "give up"), some


def test_a_cancelled_job_never_returns() -> None:
    for some in itertools.product((False, True), repeat=2):
        facts = RestartFacts(cancelled=True, in_vain=some[0], starts_over=some[1])
        assert decide("restart wanted", "facts known", facts).action == "end"


def test_the_rank_that_failed_first_is_named() -> None:
    assert decision.first_to_fail({1: 1, 2: -9, 3: 75}) == 2, "its peers only lost it"
    assert decision.first_to_fail({1: 75, 2: 3, 3: 1}) == 2
    assert decision.first_to_fail({1: 0, 2: 75}) == 2


@pytest.mark.parametrize(
    ("code", "verdict", "trains", "cancelled", "expected"),
    [
        (1, "done", True, False, ("finished", 0)),  # torchrun says 1 for every failure
        (75, None, False, False, ("stopped", 75)),
        (1, "requeue", True, False, ("stopped", 75)),
        (0, "failed", False, False, ("finished", 0)),  # the batch process wrote it too early
        (0, "failed", True, False, ("failed", 1)),
        (143, None, False, True, ("stopped", 143)),
        (137, None, True, False, ("failed", 137)),
    ],
)
def test_how_ranks_ended(
    code: int,
    verdict: State | None,
    trains: bool,
    cancelled: bool,
    expected: tuple[str, int],
) -> None:
    assert decision.outcome(code, verdict, trains, cancelled) == expected


@pytest.mark.parametrize(
    ("verdict", "trains", "expected"),
    [
        (None, True, ("failed", 1)),
        ("stopped", True, ("stopped", 75)),
        (None, False, ("stopped", 75)),
    ],
)
def test_a_training_that_nobody_asked_to_stop_does_not_stop_without_a_verdict(
    verdict: State | None, trains: bool, expected: tuple[str, int]
) -> None:
    assert decision.outcome(75, verdict, trains, False, is_asked=False) == expected


@pytest.mark.parametrize(
    ("error", "trains", "has_stepped", "expected"),
    [
        ("KeyError: 'x'", True, False, True),
        ("KeyError: 'x'", True, True, False),
        ("KeyError: 'x'", False, False, False),
        ("NameError: name 'x' is not defined", False, True, True),
        ("RuntimeError: shape '[2]' is invalid", True, False, True),
        ("RuntimeError: out of memory", True, False, False),
    ],
)
def test_mistakes_are_not_tried_again(
    error: str, trains: bool, has_stepped: bool, expected: bool
) -> None:
    assert decision.is_permanent(error, trains, has_stepped) == expected
