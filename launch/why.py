"""`python -m launch why RUN`: the one root cause of a failure, on whichever node it was.

The earliest failure of the newest attempt counts. A rank that only lost its peers is no cause, even
where it was the first to notice: it says so by its exception. Without a failed rank, the cause is
what a node's supervisor or Slurm says. Times are those of the nodes' clocks.

Exit code: 0 if there is a cause or nothing to explain, 1 if nothing tells it, 2 for no such run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import reasons, runs, states
from launch.rendezvous import attempt_directory
from launch.runs import Attempt, NoRunError
from launch.states import Condition
from train.run import RunDir

LINES = 20
"""How much is shown of the end of a log."""
LOST_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|"
    r"DistNetworkError|DistBackendError|DistStoreError|Socket Timeout|Timed out waiting|"
    r"recvValue failed|gloo/transport|NCCL|wait timeout"
)
"""What a rank's exception says when another rank or node has gone."""


@dataclass(frozen=True)
class Cause:
    """What ended a run.

    Attributes:
        what: one sentence.
        hint: what that usually means; may be empty.
        log: file that tells more; None if there is none.
        folded: what happened to the others because of it; may be empty.
    """

    what: str
    hint: str = ""
    log: Path | None = None
    folded: str = ""


def main(argv: Sequence[str]) -> int:
    """Explain the newest attempt; return the exit code."""
    options = runs.parser("why", __doc__).parse_args(argv)
    try:
        run = runs.find(options.run, options.root)
        if runs.is_sweep(run):
            raise NoRunError(f"{run.name} is a sweep: name one of its runs, {run.name}/CELL")
    except NoRunError as error:
        return runs.refuse("why", error)
    (condition,), complaint = states.look([run])
    if condition.state in ("pending", "running", "done", "stopped", "requeue"):
        print(f"run {run.name} has not failed: {condition.state}" + _in_brackets(condition.note))
        return 0
    attempts = runs.attempts(run)
    newest = attempts[-1] if attempts else None
    if newest is not None and condition.job and newest.job != condition.job.id:
        newest = None  # its newest job has not come to an attempt
    cause = _cause(run, condition, newest)
    if cause is None:
        print(f"run {run.name}, {condition.state}: nothing tells why" + _in_brackets(complaint))
        return 1
    print(_block(run, newest, cause))
    return 0


def in_a_sentence(run: RunDir) -> str:
    """What has brought the newest attempt down, without asking Slurm; empty if nothing tells."""
    cause = _cause(run, Condition("failed"), next(iter(runs.attempts(run)[-1:]), None))
    return cause.what if cause else ""


def _cause(run: RunDir, condition: Condition, attempt: Attempt | None) -> Cause | None:
    """The root cause, from those who know most to those who know least."""
    slurm_says = _slurm_says(condition)
    if attempt is not None:
        failures = runs.failures(run, attempt)
        told = {failure["rank"] for failure in failures if failure["who"] != "agent"}
        # The agent's word counts for a rank that could not speak for itself.
        failures = [f for f in failures if f["who"] != "agent" or f["rank"] not in told]
        ranks = [failure for failure in failures if failure["rank"] is not None]
        if ranks:
            first = min(ranks, key=lambda failure: _blame(run, attempt, failure))
            if _lost_peer(first):
                gone = slurm_says or _silent(run, attempt)
                if gone:
                    return Cause(gone, folded=f"{_ranks(attempt.ranks)} ended because of it")
            return _of_rank(run, attempt, first, ranks, slurm_says)
        absent = _absent(run, attempt)
        if absent is not None:
            return absent
        if failures:
            return Cause(f"on {failures[0]['host']}: {failures[0]['error']}")
    verdict = run.read_verdict()
    if slurm_says:
        return Cause(slurm_says, log=_output(run, condition))
    if (reason := _supervisor_says(run, condition)) is not None:
        return Cause(reason, log=_output(run, condition))
    if verdict is not None and verdict.state == "failed":
        return Cause(verdict.reason)
    return None


def _blame(run: RunDir, attempt: Attempt, failure: dict[str, Any]) -> tuple[bool, bool, float]:
    """The smaller, the more likely the cause: no lost peer, something to say, early."""
    log = run.log(attempt.number, failure["node"], failure["rank"])
    is_silent = not failure["error"] and not runs.tail(log)
    return _lost_peer(failure), is_silent, failure["time"]


def _lost_peer(failure: dict[str, Any]) -> bool:
    return bool(failure["who"] != "agent" and LOST_PEER.search(failure["error"]))


def _of_rank(
    run: RunDir,
    attempt: Attempt,
    first: dict[str, Any],
    ranks: Sequence[dict[str, Any]],
    slurm_says: str,
) -> Cause:
    code = first["exit_code"]
    place = f"rank {first['rank']} on {first['host']} (node {first['node']})"
    hint = ""
    number = reasons.signal_of(code)
    if first["who"] == "agent" and number is not None:
        name, _, hint = reasons.of_signal(number).partition(", ")
        what = f"{place} was ended by {name}"
        if slurm_says:
            hint = slurm_says
    elif first["error"] and first["who"] != "agent":
        what = f"{place} raised {first['error']}"
    elif code == 2:
        what = f"{place} refused the request (exit code 2)"
    else:
        what = f"{place} ended with exit code {code}"
    alike = [
        failure["rank"]
        for failure in ranks
        if failure is not first
        and (failure["exit_code"], failure["error"]) == (code, first["error"])
    ]
    others = attempt.ranks - 1 - len(alike)
    folded = f"{_ranks(len(alike))} failed in the same way" if alike else ""
    if others:
        folded += f"{', ' if folded else ''}{_ranks(others)} ended because of it"
    log = run.log(attempt.number, first["node"], first["rank"])
    return Cause(what, hint, log, folded)


def _absent(run: RunDir, attempt: Attempt) -> Cause | None:
    """The nodes of an attempt that the head waited for in vain."""
    place = attempt_directory(run, attempt.number)
    numbers = [n for n in range(len(attempt.hosts)) if not (place / f"node-{n}.json").exists()]
    if not numbers:
        return None
    names = ", ".join(f"{number} ({attempt.hosts[number]})" for number in numbers)
    return Cause(
        f"node {names} never came" if len(numbers) == 1 else f"nodes {names} never came",
        "see whether it shares the file system of the run directory, and starts python at all",
        folded=f"{attempt.ranks} ranks could not start",
    )


def _silent(run: RunDir, attempt: Attempt) -> str:
    """The nodes that came and never said how they ended; empty if there is none."""
    nodes = [
        json.loads(path.read_text())
        for path in sorted(attempt_directory(run, attempt.number).glob("node-*.json"))
    ]
    names = ", ".join(
        f"{node['node']} ({node['host']})" for node in nodes if node["state"] == "running"
    )
    return f"nothing more was heard of node {names}: it crashed, or lost its network" * bool(names)


def _slurm_says(condition: Condition) -> str:
    """How Slurm ended the job, if it was Slurm's doing; empty otherwise."""
    job = condition.job
    if job is None or job.is_local:
        return ""
    found = states.ask(job.id)
    if found is None or found.state in ("FAILED", "COMPLETED"):
        return ""
    return f"job {job.id}: {reasons.ended(found.state)}"


def _supervisor_says(run: RunDir, condition: Condition) -> str | None:
    """Why the first supervisor of the newest start gave up."""
    job = condition.job.id if condition.job else ""
    told = [
        path
        for path in (run.job / "rendezvous").glob("*.failed.json")
        if path.name.removeprefix("local-").startswith(f"{job}.")
        or path.name.startswith(f"local-{job}-")
    ]
    if not told:
        return None
    found = json.loads(max(told, key=lambda path: path.stat().st_mtime).read_text())
    return f"node {found['node']} ({found['host']}) gave up: {found['reason']}"


def _output(run: RunDir, condition: Condition) -> Path | None:
    """The file with the output of the job."""
    if condition.job is None:
        return None
    names = (f"slurm-{condition.job.id}.out", f"{condition.job.id}_0_log.out")
    return next((run.job / name for name in names if (run.job / name).exists()), None)


def _block(run: RunDir, attempt: Attempt | None, cause: Cause) -> str:
    number = f", attempt {attempt.number}" if attempt else ""
    rows = [f"run {run.name}{number}: {cause.what}"]
    rows += [f"  {text}" for text in (cause.hint, cause.folded) if text]
    lines = runs.tail(cause.log)[-LINES:] if cause.log else []
    if cause.log and lines:
        rows += [f"  the last lines of {cause.log}:", *(f"  | {line}" for line in lines)]
    return "\n".join(rows)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""
