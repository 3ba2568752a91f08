"""Find the one root cause of a failure, on whichever node it was.

`decide` is a pure function of the evidence of one attempt. A rank that only lost its peers is a
victim; it is named only if no record shows which peer was lost.
"""

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollcall.launch.runs import evidence, find, reasons, states
from rollcall.launch.runs.evidence import Evidence
from rollcall.launch.runs.states import Condition
from rollcall.records.attempt import (
    AGENT,
    LOST_PEER,
    SUPERVISOR,
    AttemptRecord,
    NodeFailure,
    RankFailure,
)
from rollcall.records.files import changed, is_there
from rollcall.records.job import local_output, slurm_output
from rollcall.run_dir import RunDir

NOT_MET = re.compile(r"not all of the \d+ nodes met|cannot reach node 0")
"""Matches the message of a parent of ranks if another node did not come."""
TIMEOUT = re.compile(r"[Tt]imed out|[Tt]imeout")
"""Matches such a message if the other rank was there, but did not answer."""
ABORTED = 128 + signal.SIGABRT
"""Exit code of a rank that may only have lost its peers: NCCL aborts the process then."""


@dataclass(frozen=True)
class RootCause:
    """What ended a run."""

    what: str  # one sentence
    hint: str = ""  # what that usually means; may be empty
    log: Path | None = None  # a file that says more
    consequences: str = ""  # what happened to the other ranks because of it; may be empty
    failure: RankFailure | None = None  # the report that it is based on, if it is one


def of_newest(run: RunDir) -> RootCause:
    """Find what brought the newest attempt down, without asking Slurm."""
    unknown = RootCause("the cause is unknown")
    return find_cause(run, Condition("failed"), find.newest_attempt(run)) or unknown


def find_cause(
    run: RunDir, condition: Condition, attempt: AttemptRecord | None
) -> RootCause | None:
    """Find the root cause; None if it is unknown."""
    slurm_says = _slurm_says(run, condition)
    if attempt is not None:
        found = decide(evidence.gather(run, attempt, slurm_says))
        if found is not None:
            first = found.failure
            if first is None or first.rank is None:
                return found
            return replace(found, log=run.log(attempt.number, first.node or 0, first.rank))
    elif (by_hand := evidence.gather_by_hand(run)) is not None:
        return decide(by_hand)
    if reason := slurm_says or _supervisor_says(run, condition):
        return RootCause(reason, log=_output(run, condition))
    verdict = run.read_verdict()
    return RootCause(verdict.reason) if verdict and verdict.state == "failed" else None


def decide(found: Evidence) -> RootCause | None:
    """Find the root cause of an attempt; sources that know most are asked first."""
    own = [failure for failure in found.failures if not _is_victim(found, failure)]
    if own:
        # One that neither raised nor printed anything may have ended because of another.
        silent = {id(each): not (each.error or _last_lines(found, each)) for each in own}
        return _of_failure(found, min(own, key=lambda each: (silent[id(each)], each.time)))
    if found.hang:
        text, _, stacks = found.hang.partition("; stacks of all ranks: ")
        return RootCause(text, hint=f"stacks of all ranks: {stacks}")
    ranks = [failure for failure in found.failures if failure.rank is not None]
    what = next(_who_was_lost(found, ranks), None)
    if what is not None:
        count = found.attempt.ranks - (what.failure is not None)
        ended = "ended because of it" if ranks or found.slurm else "could not start"
        return replace(what, consequences=what.consequences or f"{_ranks(count)} {ended}")
    if ranks:
        return _of_failure(found, ranks[0])
    return RootCause(_place(found.failures[0])) if found.failures else None


def _is_victim(found: Evidence, failure: RankFailure) -> bool:
    """Whether a rank, or the parent of a node's ranks, may only have lost others."""
    if failure.who == SUPERVISOR:
        return False
    if failure.rank is None:
        return bool(NOT_MET.search(failure.error))
    if failure.who == AGENT and failure.exit_code != ABORTED:
        return False
    said = "" if failure.who == AGENT else failure.error
    return bool(LOST_PEER.search(said or _last_lines(found, failure)))


def _last_lines(found: Evidence, failure: RankFailure) -> str:
    return "" if failure.rank is None else found.last_lines.get(failure.rank, "")


def _who_was_lost(found: Evidence, ranks: Sequence[RankFailure]) -> Iterator[RootCause]:
    """Yield what may have ended the ranks that lost their peers, the most certain first."""
    for each in found.gave_up:
        yield RootCause(f"node {each.node} ({each.host}) gave up: {each.reason}")
    if found.slurm:
        yield RootCause(found.slurm)
    yield from _ended_parents(found)
    yield from _gone_nodes(found)
    yield from _left_early(found, ranks)
    if not ranks:
        yield from _absent_nodes(found)
    yield from _stuck(found, ranks)


def _ended_parents(found: Evidence) -> Iterator[RootCause]:
    """Name nodes whose ranks' parent ended without a word, and not by its supervisor."""
    reported = {failure.node for failure in found.failures}
    for part in found.nodes.values():
        if part.state == "failed" and not part.is_victim and part.node not in reported:
            number = reasons.signal_of(part.exit_code or 0)
            name, hint = reasons.of_signal(number) if number is not None else ("", "")
            how = f"was ended by {name}" if name else f"ended with exit code {part.exit_code}"
            who = f"the parent of the ranks on node {part.node} ({part.host})"
            yield RootCause(f"{who} {how}", hint)


def _left_early(found: Evidence, ranks: Sequence[RankFailure]) -> Iterator[RootCause]:
    """Name the rank that ended in order, without an error, before others lost their peers."""
    in_order = [end for end in found.ends.values() if end.exit_code == 0]
    if not in_order or not ranks:
        return
    first = min(in_order, key=lambda end: end.time)
    failure = _silent(found, first.rank, first.time)
    what = f"{_place(failure)} ended with exit code 0, before the other ranks had finished"
    hint = "its program returned, or its data ended early"
    yield RootCause(what, hint, failure=failure)


def _gone_nodes(found: Evidence) -> Iterator[RootCause]:
    """Name the nodes that never wrote how they ended, or were silent."""
    text = "nothing more was heard of {}: its supervisor was killed, or the host crashed or is cut "
    text += "off"
    for number, attempt in found.last_seen.items():
        name = f"{number} ({found.attempt.hosts[number]})"
        yield RootCause(text.format(f"node {name} since attempt {attempt}"))
    names = [f"{it.node} ({it.host})" for it in found.nodes.values() if it.state == "running"]
    if not names and found.lost is not None and found.lost.node in found.nodes:
        names = [f"{found.lost.node} ({found.lost.host})"]
    if names:
        yield RootCause(text.format(_nodes(names)))


def _absent_nodes(found: Evidence) -> Iterator[RootCause]:
    """Name the nodes that the head waited for in vain."""
    hosts = enumerate(found.attempt.hosts)
    if names := [f"{number} ({host})" for number, host in hosts if number not in found.nodes]:
        hint = "check that it shares the file system of the run directory, and that python starts"
        could_not = f"{_ranks(found.attempt.ranks)} could not start"
        yield RootCause(f"{_nodes(names)} never came", hint, consequences=could_not)


def _stuck(found: Evidence, ranks: Sequence[RankFailure]) -> Iterator[RootCause]:
    """Name the only rank that still ran when the others no longer waited for it."""
    ended = {failure.rank for failure in ranks} | set(found.ends)
    left = set(range(found.attempt.ranks)) - ended
    if len(left) == 1 and ranks and any(TIMEOUT.search(each.error) for each in ranks):
        failure = _silent(found, left.pop())
        what = f"{_place(failure)} did not reach what the other ranks waited for in vain"
        yield RootCause(what, "it hung or took too long: see rollcall stacks", failure=failure)


def _silent(found: Evidence, rank: int, time: float = 0.0) -> RankFailure:
    """Return a report about a rank that wrote none itself."""
    node, host = found.host_of(rank)
    return RankFailure(time, host, 0, "", rank, f"rank-{rank}", node)


def _place(failure: RankFailure) -> str:
    if failure.rank is None:
        return f"on {failure.host}: {failure.error}"
    return f"rank {failure.rank} on {failure.host} (node {failure.node})"


def _of_failure(found: Evidence, first: RankFailure) -> RootCause:
    """Describe what a rank or the parent of a node's ranks reported."""
    code, place, hint = first.exit_code, _place(first), ""
    part = found.nodes.get(first.node or 0)
    number = reasons.signal_of(code)
    name, usual = reasons.of_signal(number) if number is not None else ("", "")
    asked = part.asked if part is not None else None
    if first.who == SUPERVISOR:
        what = f"on {first.host} (node {first.node}) {first.error}"
    elif first.rank is None:
        what = place
    elif name and asked == name:
        what = found.slurm or f"node {first.node} ({first.host}) was asked to stop by {asked}"
        hint = f"{place} did not handle it"
    elif first.who == AGENT and name:
        what, hint = f"{place} was ended by {name}", found.slurm or usual
    elif first.error and first.who != AGENT:
        what = f"{place} raised {first.error}"
    elif code == 2:
        what = f"{place} refused the request (exit code 2)"
    else:
        what = f"{place} ended with exit code {code}"
    ranks = [failure for failure in found.failures if failure.rank is not None]
    same = max(0, sum((it.exit_code, it.error) == (code, first.error) for it in ranks) - 1)
    others = found.attempt.ranks - (first.rank is not None) - same
    consequences = [f"{_ranks(same)} failed in the same way"] if same else []
    consequences += [f"{_ranks(others)} ended because of it"] if others else []
    return RootCause(what, hint, None, ", ".join(consequences), first)


def _nodes(names: Sequence[str]) -> str:
    return f"{'node' if len(names) == 1 else 'nodes'} {', '.join(names)}"


def _slurm_says(run: RunDir, condition: Condition) -> str:
    """Say how Slurm ended the job, or that its batch process was lost; empty if neither."""
    job = condition.job
    found = states.ask(job.id) if job and not job.is_local else None
    if job is None or found is None:
        return ""
    if found.state in ("FAILED", "COMPLETED"):
        text = states.lost_batch(run, job)
        return f"job {job.id}: {text}" if text else ""
    return f"job {job.id}: {reasons.ended(found.state)}"


def _supervisor_says(run: RunDir, condition: Condition) -> str | None:
    """Say why the first supervisor of the newest start gave up."""
    job = condition.job.id if condition.job else ""
    own = (f"{job}.", f"local-{job}.", f"local-{job}-")
    found = {
        it: why for it, why in NodeFailure.read_all(run.path).items() if it.name.startswith(own)
    }
    if not found:
        return None
    failure = found[max(found, key=changed)]
    return f"node {failure.node} ({failure.host}) gave up: {failure.reason}"


def _output(run: RunDir, condition: Condition) -> Path | None:
    if condition.job is None:
        return None
    job = condition.job.id
    paths = (slurm_output(run.job, job), local_output(run.job, job, 0))
    return next((path for path in paths if is_there(path)), None)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
