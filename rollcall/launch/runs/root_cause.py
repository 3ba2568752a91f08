"""Find the one root cause of a failure, on whichever node it was.

`decide` is a pure function of the evidence of one attempt. A rank that only lost its peers is a
victim; it is named only if no record shows which peer was lost.
"""

import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from rollcall.launch.runs import find, reasons, states
from rollcall.launch.runs.decision import has_failed
from rollcall.launch.runs.evidence import Evidence, gather, gather_by_hand, storage_problem
from rollcall.messages.refusal import REFUSED
from rollcall.messages.text import counted
from rollcall.records import attempt as records
from rollcall.records.attempt import AGENT, SUPERVISOR, AttemptRecord, NodeFailure, RankFailure
from rollcall.records.code import CodeRecord
from rollcall.records.job import Submission, local_output, slurm_output
from rollcall.records.run_dir import RunDir
from rollcall.system.files import changed, is_there

NOT_MET = re.compile(r"not all of the \d+ nodes met|cannot reach node 0")
"""Matches the message of a parent of ranks if another node did not come."""
MAX_LINE = 2000
"""Most characters of a cause that a supervisor prints: an exception may print a whole tensor."""
MISSING = re.compile(r"No such file or directory: '([^']+)'")
"""Matches the message of Python for a file that does not exist."""
UNKNOWN = "the cause is unknown"
REFUSAL = re.compile(r"^rollcall: error: rank (\d+)(:? .+)", re.MULTILINE)
TIMEOUT = re.compile(r"[Tt]imed out|[Tt]imeout")
"""Matches such a message if the other rank was there, but did not answer."""


@dataclass(frozen=True)
class RootCause:
    """The cause of the end of a run."""

    what: str  # one sentence
    hint: str = ""  # what that usually means; may be empty
    log: Path | None = None  # a file that says more
    consequences: str = ""  # what happened to the other ranks because of it; may be empty
    failure: RankFailure | None = None  # the report that it is based on, if it is one
    is_refusal: bool = False  # a rank refused the request, before the first step

    def __str__(self) -> str:
        log = f"its log: {self.log}" if self.log else ""
        parts = (self.what[:MAX_LINE], self.hint, self.consequences, log)
        return "\n  ".join(part for part in parts if part)

    def clears(self, rank: int) -> bool:
        """Return True if something else than this rank is known to be the culprit."""
        return self.what != UNKNOWN and (self.failure is None or self.failure.rank != rank)


def of_newest(run: RunDir) -> RootCause:
    """Find what brought the newest attempt down, without asking Slurm."""
    cause = find_cause(run, states.Condition("failed"), find.newest_attempt(run))
    return cause or RootCause(UNKNOWN)


def find_cause(
    run: RunDir, condition: states.Condition, attempt: AttemptRecord | None
) -> RootCause | None:
    """Find the root cause; None if it is unknown."""
    slurm_says = _slurm_says(run, condition)
    if attempt is not None:
        cause = decide(gather(run, attempt, slurm_says))
        if cause is not None:
            first = cause.failure
            if first is None or first.rank is None:
                return cause
            log = run.log(attempt.number, first.node or 0, first.rank)
            return replace(cause, log=log, hint=_left_out(run, first.error) or cause.hint)
    elif (by_hand := gather_by_hand(run)) is not None:
        return decide(by_hand)
    if reason := slurm_says or _supervisor_says(run, condition):
        return RootCause(reason, log=_output(run, condition))
    verdict = run.read_verdict()
    reason = verdict.reason if verdict and verdict.state == "failed" else storage_problem(run)
    return RootCause(reason) if reason else None


def _left_out(run: RunDir, error: str) -> str:
    """Say that a missing file exists where the run was submitted; empty if it does not."""
    match, source = MISSING.search(error), CodeRecord.read(run.job / "source.json")
    newest = Submission.newest(run.path)
    if match is None or source is None or newest is None or newest.directory is None:
        return ""
    here, root = Path(newest.directory), Path(source.root)
    inside = match[1].removeprefix(f"{run.code}/")
    path = Path(os.path.normpath((here if inside == match[1] else root) / inside))
    if not (path.is_relative_to(root) and is_there(path)):
        return ""
    why = "git ignores it" if is_there(root / ".git") else "it is hidden"
    if path.suffix in (".pt", ".pth", ".ckpt"):
        why = "it may be a result of an earlier run"
    link = os.path.relpath(path if path.parent in (here, root) else path.parent, here)
    advice = f"submit it again with --resume --new-code --link {link}"
    return f"{path} exists, but was left out of the run's copy, because {why}; {advice}"


def decide(evidence: Evidence) -> RootCause | None:
    """Find the root cause of an attempt; sources that know most are asked first."""
    if evidence.hang:  # the watchdog then ends all ranks, without a word of their own
        text, _, stacks = evidence.hang.partition("; stacks of all ranks: ")
        return RootCause(text, hint=f"stacks of all ranks: {stacks}")
    causes = [failure for failure in evidence.failures if not _is_victim(evidence, failure)]
    if causes:
        # One that neither raised nor printed anything may have ended because of another.
        spoke = [failure for failure in causes if failure.error or _last_lines(evidence, failure)]
        return _of_failure(evidence, min(spoke or causes, key=attrgetter("time")))
    ranks = [failure for failure in evidence.failures if failure.rank is not None]
    what = next(_who_was_lost(evidence, ranks), None)
    if what is not None:
        count = evidence.attempt.ranks - (what.failure is not None)
        has_begun = ranks or evidence.slurm or evidence.places
        ended = "ended because of it" if has_begun else "could not start"
        return replace(what, consequences=what.consequences or f"{counted(count, 'rank')} {ended}")
    if ranks:
        return _of_failure(evidence, ranks[0])
    return RootCause(_place(evidence.failures[0])) if evidence.failures else None


def _is_victim(evidence: Evidence, failure: RankFailure) -> bool:
    """Return True if a rank, or the parent of a node's ranks, may only have lost others."""
    if failure.who == SUPERVISOR:
        return False
    if failure.rank is None:
        return bool(NOT_MET.search(failure.error))
    # NCCL aborts the process of a rank that has lost its peers.
    if failure.who == AGENT and failure.exit_code != 128 + signal.SIGABRT:
        return False
    said = "" if failure.who == AGENT else failure.error
    return bool(records.LOST_PEER.search(said or _last_lines(evidence, failure)))


def _last_lines(evidence: Evidence, failure: RankFailure) -> str:
    return "" if failure.rank is None else evidence.last_lines.get(failure.rank, "")


def _who_was_lost(evidence: Evidence, ranks: Sequence[RankFailure]) -> Iterator[RootCause]:
    """Yield what may have ended the ranks that lost their peers, the most certain first."""
    for report in evidence.gave_up:
        yield RootCause(f"node {report.node} ({report.host}) gave up: {report.reason}")
    if evidence.slurm:
        yield RootCause(evidence.slurm)
    if evidence.storage:
        yield RootCause(evidence.storage, hint="the run continues if it is submitted again")
    yield from _ended_parents(evidence)
    yield from _gone_nodes(evidence)
    yield from _left_early(evidence, ranks)
    if not ranks:
        yield from _absent_nodes(evidence)
    yield from _stuck(evidence, ranks)


def _ended_parents(evidence: Evidence) -> Iterator[RootCause]:
    """Name nodes whose ranks' parent ended without a word, and not by its supervisor."""
    reported = {failure.node for failure in evidence.failures}
    # A parent that was killed has not written how its ranks ended.
    open_nodes = {node for rank, node in evidence.places.items() if rank not in evidence.ends}
    reported |= set(evidence.places.values()) - open_nodes
    for part in evidence.nodes.values():
        if part.state == "failed" and not part.is_victim and part.node not in reported:
            number = reasons.signal_of(part.exit_code or 0)
            name, hint = reasons.of_signal(number) if number is not None else ("", "")
            how = f"was ended by {name}" if name else f"ended with exit code {part.exit_code}"
            who = f"the parent of the ranks on node {part.node} ({part.host})"
            yield RootCause(f"{who} {how}", hint)


def _left_early(evidence: Evidence, ranks: Sequence[RankFailure]) -> Iterator[RootCause]:
    """Name the rank that left, without an error, before others lost their peers."""
    in_order = [end for end in evidence.ends.values() if not has_failed(end.exit_code)]
    if not in_order or not ranks:
        return
    first = min(in_order, key=lambda end: end.time)
    failure = _silent(evidence, first.rank, first.time, first.exit_code)
    what = f"{_place(failure)} ended with exit code {first.exit_code}, before the other ranks had"
    hint = "it was asked to stop, or its program returned, or its data ended early"
    yield RootCause(f"{what} finished", hint, failure=failure)


def _gone_nodes(evidence: Evidence) -> Iterator[RootCause]:
    """Name the nodes that never wrote how they ended, or were silent."""
    text = "nothing more was heard of {}: its supervisor was killed, or the host crashed or is cut "
    text += "off"
    for number, attempt in evidence.last_seen.items():
        name = f"{number} ({evidence.attempt.hosts[number]})"
        yield RootCause(text.format(f"node {name} since attempt {attempt}"))
    running = [part for part in evidence.nodes.values() if part.state == "running"]
    names = [f"{part.node} ({part.host})" for part in running]
    if not names and evidence.lost is not None and evidence.lost.node in evidence.nodes:
        names = [f"{evidence.lost.node} ({evidence.lost.host})"]
    if names:
        yield RootCause(text.format(_nodes(names)))


def _absent_nodes(evidence: Evidence) -> Iterator[RootCause]:
    """Name the nodes that never came to the head's rendezvous."""
    hosts = enumerate(evidence.attempt.hosts)
    if names := [f"{number} ({host})" for number, host in hosts if number not in evidence.nodes]:
        hint = "check that it shares the file system of the run directory, and that python starts"
        could_not = counted(evidence.attempt.ranks, "rank") + " could not start"
        yield RootCause(f"{_nodes(names)} never came", hint, consequences=could_not)


def _stuck(evidence: Evidence, ranks: Sequence[RankFailure]) -> Iterator[RootCause]:
    """Name the only rank that still ran when the others no longer waited for it."""
    ended = {failure.rank for failure in ranks} | set(evidence.ends)
    left = set(range(evidence.attempt.ranks)) - ended
    if len(left) == 1 and ranks and any(TIMEOUT.search(report.error) for report in ranks):
        failure = _silent(evidence, left.pop())
        what = f"{_place(failure)} did not reach the collective that the other ranks waited in"
        yield RootCause(what, "it hung or took too long: see rollcall stacks", failure=failure)


def _silent(evidence: Evidence, rank: int, time: float = 0.0, code: int = 0) -> RankFailure:
    hosts = evidence.attempt.hosts
    on_each = max(1, evidence.attempt.ranks // len(hosts))  # if all nodes have the same number
    node = min(evidence.places.get(rank, rank // on_each), len(hosts) - 1)
    return RankFailure(time, hosts[node], code, "", rank, f"rank-{rank}", node)


def _place(failure: RankFailure) -> str:
    if failure.rank is None:
        return f"on {failure.host}: {failure.error}"
    return f"rank {failure.rank} on {failure.host} (node {failure.node})"


def _of_failure(evidence: Evidence, first: RankFailure) -> RootCause:
    """Describe what a rank or the parent of a node's ranks reported."""
    code, hint = first.exit_code, ""
    logs = (_last_lines(evidence, failure) for failure in evidence.failures)
    said = next(filter(None, map(REFUSAL.search, logs)), None) if code in (1, REFUSED) else None
    if said:  # all ranks leave, and rank 0 says which one failed
        first = _silent(evidence, int(said[1]), first.time, code)
    rank = _place(first)
    is_refusal = code == REFUSED and not evidence.has_stepped
    part = evidence.nodes.get(first.node or 0)
    number = reasons.signal_of(code)
    name, usual = reasons.of_signal(number) if number is not None else ("", "")
    asked = part.asked if part is not None else None
    if first.who == SUPERVISOR:
        what = f"on {first.host} (node {first.node}) {first.error}"
    elif first.rank is None:
        what = rank
    elif name and asked == name:
        what = evidence.slurm or f"node {first.node} ({first.host}) was asked to stop by {asked}"
        hint = f"{rank} did not handle it"
    elif first.who == AGENT and name:
        what, hint = f"{rank} was ended by {name}", evidence.slurm or usual
        if records.OUT_OF_MEMORY in first.error:
            what, hint = f"{what}, {records.OUT_OF_MEMORY}", reasons.ENDED["OUT_OF_MEMORY"]
    elif first.error and first.who != AGENT:
        what = f"{rank} raised {first.error}"
        hint = reasons.NO_THREADS if "can't start new thread" in first.error else ""
    elif said:
        what = f"{rank}{said[2]}"
    elif is_refusal:
        what = f"{rank} refused the request (exit code 2)"
    else:
        what = f"{rank} ended with exit code {code}"
    ranks = [failure for failure in evidence.failures if failure.rank is not None]
    alike = [rank for rank in ranks if (rank.exit_code, rank.error) == (code, first.error)]
    same = max(0, len(alike) - 1)
    others = evidence.attempt.ranks - (first.rank is not None) - same
    consequences = [counted(same, "rank") + " failed in the same way"] if same else []
    consequences += [counted(others, "rank") + " ended because of it"] if others else []
    return RootCause(what, hint, None, ", ".join(consequences), first, is_refusal)


def _nodes(names: Sequence[str]) -> str:
    return f"{'node' if len(names) == 1 else 'nodes'} {', '.join(names)}"


def _slurm_says(run: RunDir, condition: states.Condition) -> str:
    """Say how Slurm ended the job, or that its batch process was lost; empty if neither."""
    job = condition.job
    info = states.ask(job.id) if job and not job.is_local else None
    if job is None or info is None:
        return ""
    if info.state in ("FAILED", "COMPLETED"):
        text = states.lost_batch(run, job)
        return f"job {job.id}: {text}" if text else ""
    return f"job {job.id}: {reasons.ended(info.state)}"


def _supervisor_says(run: RunDir, condition: states.Condition) -> str | None:
    """Say why the first supervisor of the newest start gave up."""
    job = condition.job.id if condition.job else ""
    starts = (f"{job}.", f"local-{job}.", f"local-{job}-")
    reports = NodeFailure.read_all(run.path).items()
    failures = {path: report for path, report in reports if path.name.startswith(starts)}
    if not failures:
        return None
    failure = failures[max(failures, key=changed)]
    return f"node {failure.node} ({failure.host}) gave up: {failure.reason}"


def _output(run: RunDir, condition: states.Condition) -> Path | None:
    if condition.job is None:
        return None
    job = condition.job.id
    paths = (slurm_output(run.job, job), local_output(run.job, job, 0))
    return next((path for path in paths if is_there(path)), None)
