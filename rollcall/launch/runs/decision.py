"""Decide what follows when a run comes down: one table, and rules for what counts as progress.

Nothing here knows a clock, a file or a process. The agent (`rank/fork.py`), the supervisor
(`node/`) and the batch process (`batch/`) gather facts, ask `decide` and carry out the action.
docs/make.py shows TABLE in docs/reliability.md.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import EX_TEMPFAIL
from typing import Literal, NamedTuple

from rollcall.records.attempt import PartState
from rollcall.records.job import Restart, RestartCause
from rollcall.records.run import State

RestartState = (
    PartState  # of the ranks of a node, once they have ended
    | Literal["ranks run", "ranks end"]  # the agent of a node
    | Literal["attempt runs", "head awaited", "node left", "run over"]  # the supervisor
    | Literal["step runs", "restart wanted"]  # the batch process
    | Literal["over"]  # there is nothing left to decide
)
RestartEvent = (
    Literal["rank ended", "ranks ended", "step ended", "job ended", "time is up", "asked to stop"]
    | Literal["node failed", "node lost", "batch silent", "hosts free", "replaced", "run ended"]
    | Literal["new round", "no more rounds", "facts known"]
)
RestartAction = (
    Literal["wait", "pass the signal on", "end the ranks", "kill the ranks", "end the step"]
    | Literal["fork the next ranks", "start again", "start elsewhere", "requeue", "take over"]
    | Literal["save the run", "wait for the head", "cancel the job", "stand aside", "end"]
    | Literal["end as done", "end as stopped", "give up", "give way", "leave", "fail", "replace"]
)


@dataclass(frozen=True)
class RestartFacts:
    """The evidence of an event; what does not apply stays False."""

    failed: bool = False  # see `has_failed`
    replaceable: bool = False  # a signal ended a rank; the others continue, a spare process is left
    rescuing: bool = False  # ranks save the newest step, since RESCUE seconds at most
    finished: bool = False  # the ranks, or the step, ended with success
    done: bool = False  # the verdict says so
    saved: bool = False  # the run saved and wants to be started again: exit code 75
    not_head: bool = False  # this supervisor does not decide: another node is the head
    leaves: bool = False  # a node refused the request or gave up: it takes no part any more
    fenced: bool = False  # the ranks gave way, because another attempt of the run has begun
    asked: bool = False  # a person or Slurm asked the run to stop
    insists: bool = False  # a person asked by a second Ctrl-C
    used_up: bool = False  # all restarts of --max-restarts
    permanent: bool = False  # every attempt would meet the same exception
    in_vain: bool = False  # the run came down too often without a new checkpoint
    starts_over: bool = False  # asked to stop, and nothing says that the program can continue
    cancelled: bool = False  # by `rollcall cancel`
    node_lost: bool = False  # a supervisor is silent, or vanished
    slurm_cause: bool = False  # Slurm ended the job for a reason after which it may continue
    expanding: bool = False  # the step was asked to save, to continue on more hosts
    srun_killed: bool = False  # unasked, and the run has not come to its end
    hosts_back: bool = False  # lost hosts of the job answer again
    first: bool = False  # of the supervisors that take over the batch process
    comes_back: bool = False  # the run was asked to stop, and is to be started again
    gone: bool = False  # the batch process has died; it is not just stopped


class Rule(NamedTuple):
    """A row of the table: what to do in a state after an event, if all these facts hold."""

    state: RestartState
    event: RestartEvent
    facts: tuple[str, ...]
    action: RestartAction
    next: RestartState
    grace: float | None = None  # seconds that the ranks or the step have to end by themselves


TABLE = (
    # The agent: the ranks of one node.
    Rule("ranks run", "rank ended", ("replaceable",), "replace", "ranks run"),
    Rule("ranks run", "rank ended", ("failed",), "fork the next ranks", "ranks end", 2.0),
    Rule("ranks run", "rank ended", (), "wait", "ranks run"),
    Rule("ranks end", "rank ended", (), "wait", "ranks end"),
    Rule("ranks end", "time is up", ("rescuing",), "wait", "ranks end"),
    Rule("ranks end", "time is up", (), "kill the ranks", "over"),
    # The supervisor of a node, while its ranks run, and when they have ended.
    Rule("attempt runs", "asked to stop", (), "pass the signal on", "attempt runs", 600.0),
    Rule("attempt runs", "node failed", (), "end the ranks", "attempt runs", 3.0),
    Rule("attempt runs", "node lost", (), "end the ranks", "attempt runs", 2.0),
    Rule("attempt runs", "time is up", ("rescuing",), "wait", "attempt runs"),
    Rule("attempt runs", "time is up", (), "kill the ranks", "attempt runs"),
    Rule("attempt runs", "batch silent", ("gone", "comes_back"), "requeue", "restart wanted"),
    Rule("attempt runs", "batch silent", (), "wait", "attempt runs"),
    Rule("finished", "ranks ended", ("not_head",), "wait for the head", "head awaited"),
    Rule("finished", "ranks ended", (), "end as done", "run over"),
    Rule("stopped", "ranks ended", ("asked",), "end as stopped", "run over"),
    Rule("stopped", "ranks ended", ("not_head",), "wait for the head", "head awaited"),
    Rule("stopped", "ranks ended", (), "end as stopped", "run over"),
    Rule("failed", "ranks ended", ("node_lost",), "leave", "node left"),
    Rule("failed", "ranks ended", ("not_head",), "wait for the head", "head awaited"),
    Rule("failed", "ranks ended", ("fenced",), "give way", "run over"),
    Rule("failed", "ranks ended", ("leaves",), "give up", "run over"),
    Rule("failed", "ranks ended", ("asked",), "give up", "run over"),
    Rule("failed", "ranks ended", ("used_up",), "give up", "run over"),
    Rule("failed", "ranks ended", ("permanent",), "fail", "run over"),
    Rule("failed", "ranks ended", ("in_vain",), "fail", "run over"),
    Rule("failed", "ranks ended", (), "start again", "attempt runs"),
    # A supervisor that waits for the head, or leaves, or has done its part.
    Rule("head awaited", "new round", (), "start again", "attempt runs"),
    Rule("head awaited", "no more rounds", (), "end", "run over"),
    Rule("head awaited", "asked to stop", ("finished",), "wait", "head awaited"),
    Rule("head awaited", "asked to stop", ("insists",), "end as stopped", "run over"),
    Rule("head awaited", "asked to stop", (), "wait", "head awaited", 20.0),
    Rule("head awaited", "node lost", (), "leave", "node left"),
    Rule("head awaited", "node failed", (), "give up", "run over"),
    Rule("head awaited", "time is up", ("asked",), "end as stopped", "run over"),
    Rule("head awaited", "time is up", (), "give up", "run over"),
    Rule("node left", "batch silent", ("first",), "take over", "step runs"),
    Rule("node left", "batch silent", (), "wait", "node left"),
    Rule("run over", "batch silent", ("comes_back",), "requeue", "restart wanted"),
    Rule("run over", "batch silent", ("gone",), "end", "over"),
    Rule("run over", "batch silent", (), "cancel the job", "over"),
    # The batch process: the step of the job.
    Rule("step runs", "hosts free", ("asked",), "wait", "step runs"),
    Rule("step runs", "hosts free", (), "save the run", "step runs"),
    Rule("step runs", "node lost", (), "end the step", "step runs", 5.0),
    Rule("step runs", "run ended", ("failed",), "end the step", "step runs", 600.0),
    Rule("step runs", "run ended", (), "end the step", "step runs", 30.0),
    Rule("step runs", "replaced", (), "stand aside", "over"),
    Rule("step runs", "job ended", ("finished",), "end", "over"),
    Rule("step runs", "job ended", ("slurm_cause",), "requeue", "restart wanted"),
    Rule("step runs", "job ended", (), "end", "over"),
    Rule("step runs", "step ended", ("done",), "end as done", "over"),
    Rule("step runs", "step ended", ("expanding", "hosts_back"), "start elsewhere", "step runs"),
    Rule("step runs", "step ended", ("expanding",), "requeue", "restart wanted"),
    Rule("step runs", "step ended", ("srun_killed",), "start elsewhere", "restart wanted"),
    Rule("step runs", "step ended", ("saved",), "requeue", "restart wanted"),
    Rule("step runs", "step ended", ("failed", "asked"), "requeue", "restart wanted"),
    Rule("step runs", "step ended", ("failed", "node_lost"), "start elsewhere", "restart wanted"),
    Rule("step runs", "step ended", (), "end", "over"),
    # Before any restart by the batch process, or by a supervisor in its place.
    Rule("restart wanted", "facts known", ("cancelled",), "end", "over"),
    Rule("restart wanted", "facts known", ("starts_over",), "fail", "over"),
    Rule("restart wanted", "facts known", ("in_vain",), "fail", "over"),
    Rule("restart wanted", "facts known", (), "start again", "step runs"),
)
"""In each state and after each event, the first row whose facts all hold decides."""

HARMLESS = ("preempted", "more hosts")
"""Causes that say nothing about the run; they never count against it."""
UNASKED: tuple[RestartCause, ...] = ("time limit", "asked to stop")
"""Causes after which Slurm alone would not start a job again, as it does with --requeue after a
preemption or the loss of a node."""
MAX_IN_VAIN = 3
"""After this many times in a row without a new checkpoint, a run has failed."""
RESCUE = 60.0
"""Seconds that ranks have to save the newest step after another rank was lost."""
BAD_HOST = 2
"""After bringing a run down this often, a host is excluded from its job."""
PERMANENT = re.compile(
    r"(?P<anywhere>SyntaxError|IndentationError|TabError|ImportError|ModuleNotFoundError|NameError"
    r"|UnboundLocalError)"
    r"|AssertionError|AttributeError|IndexError|KeyError|NotImplementedError|TypeError|ValueError"
    r"|FileNotFoundError|NotADirectoryError|IsADirectoryError|PermissionError"
    r"|RuntimeError(?=: .*(shape|size of tensor|sizes|dtype|not implemented for|out of bounds))"
)
"""Exceptions of which every attempt meets the same ones, if the first one met them at its start;
those in `anywhere` are mistakes in the code wherever they occur."""


def decide(state: RestartState, event: RestartEvent, facts: RestartFacts = RestartFacts()) -> Rule:
    """Return the row of the table that says what to do."""
    rows = (rule for rule in TABLE if (rule.state, rule.event) == (state, event))
    return next(rule for rule in rows if all(getattr(facts, name) for name in rule.facts))


def has_failed(code: int) -> bool:
    """Return True if a rank with this exit code failed; one that was asked to stop did not."""
    return code not in (0, EX_TEMPFAIL)


def outcome(
    code: int, verdict: State | None, trains: bool, is_cancelled: bool, is_asked: bool = True
) -> tuple[PartState, int]:
    """Return the state in which the ranks of a node ended, and the exit code for it.

    Args:
        code: the agent's exit code. torchrun reports every failure as 1, so a verdict counts more.
        verdict: rank 0's. A user's program writes none; the batch process may have, before the end.
        is_cancelled: a person ended the job: then a user's program that ends has not failed.
        is_asked: the run was asked to stop, or only the head knows. A training that was not
            writes a verdict before it stops: without one, a rank has left by itself.
    """
    if verdict == "done":
        return "finished", 0
    has_saved = code == EX_TEMPFAIL and (is_asked or not trains)
    if has_saved or verdict in ("requeue", "stopped"):
        return "stopped", EX_TEMPFAIL
    if code == 0 and (verdict is None or not trains):
        return "finished", 0
    if is_cancelled:
        return "stopped", code
    return "failed", code if has_failed(code) else 1


def first_to_fail(codes: Mapping[int, int]) -> int:
    """Return the process that failed first, of those in the order of their ends; -n is signal n.

    Ranks that lose a peer fail too, at once and loudly. A rank that a signal killed did not fail
    because of a peer, so it comes first; a rank that was asked to stop comes last.
    """
    failed = [number for number, code in codes.items() if code]
    return min(failed, key=lambda number: (codes[number] > 0, codes[number] == EX_TEMPFAIL))


def is_in_vain(before: Sequence[Restart], reached: int, cause: RestartCause) -> bool:
    """Return True if a run came down too often at this step, after these restarts in its job."""
    if cause in HARMLESS:
        return False
    count, next_cause = 1, cause
    for line in reversed(before):
        if line.cause not in HARMLESS:
            if line.step != reached:
                break
            # When a node is lost, the ranks on other nodes crash before its absence is noticed.
            count += (line.cause, next_cause) != ("crash", "lost node")
        next_cause = line.cause
    return count >= MAX_IN_VAIN


def is_permanent(error: str, trains: bool, has_stepped: bool) -> bool:
    """Return True if every further attempt would meet the same exception: it is a mistake.

    In a training, only before any of its attempts has completed a step. Nobody knows how far a
    user's script was; only a mistake in its code counts.
    """
    match = None if trains and has_stepped else PERMANENT.match(error)
    return match is not None and (trains or match["anywhere"] is not None)
