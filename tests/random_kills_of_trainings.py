"""Kill random processes of whole trainings: supervisors, agents and ranks, as in a user's run.

Every run has two simulated nodes of two ranks, trains in exact mode, and saves most of the time. At
random times a rank, an agent, a fork server, all processes of a node or the whole job are killed.
If the supervisors give up, another job resumes the run.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
from lab import wait_until
from ranks import logged_steps

from rollcall.records.files import read_lines
from rollcall.run_dir import RunDir
from rollcall.train.checkpoint import layout
from rollcall.train.checkpoint.tools import verify
from rollcall.train.exact import fingerprint

ROOT = Path(__file__).parents[1]
Process = subprocess.Popen[bytes]
STEPS, KEEP = 60, 2
TRAIN = ["-m", "train", "digits", "device=cpu", "model.name=mlp", "exact=true", "log.every=1"]
TRAIN += [f"train.steps={STEPS}", f"checkpoint.keep_last={KEEP}", "checkpoint.every=4"]
JOB = """
export SUBMITIT_LOCAL_JOB_ID=$$ SUBMITIT_LOCAL_NTASKS=2
for node in 0 1; do SUBMITIT_LOCAL_GLOBALID=$node "$@" & done
wait
"""
"""Start the nodes of a local job like submitit; the shell is its controller."""
KINDS = {"job": 1, "node": 2, "fork server": 1, "agent": 3, "rank": 4}
"""What is killed, with its weight in the random choice; each is the parent of the next."""
WHOLE = ("job", "node")
"""What is killed together with its descendants."""
AT_ONCE = 0.2
"""Fraction of the kills that do not wait until the run trains again after the previous kill."""
KILLS_PER_RUN = (4, 10)
"""Smallest and largest number of kills in a run; then it trains to its end."""
MAX_WAIT = 1.0
"""Most seconds until a kill."""
TIMEOUT = 120.0
FILES = {"checkpoints", "claim", "config.yaml", "events.jsonl", "job", "logs", "metrics.jsonl"}
FILES |= {"verdict.json"}
"""The content of a finished run's directory."""


def campaign(kills: int, root: Path, seed: int) -> str:
    """Kill this number of times, in one run after another; return a summary.

    Raises:
        AssertionError: something was lost, or files or processes were left over.
    """
    chance, counts = random.Random(seed), Counter[str]()
    whole = RunDir(root, "undisturbed")
    _job(whole, chance, counts, 0)
    right = _weights(whole)
    _check(whole, right)
    counts.clear()
    while counts["kills"] < kills:
        counts["runs"] += 1
        run = RunDir(root, f"run-{counts['runs']}")
        until = min(kills, counts["kills"] + chance.randint(*KILLS_PER_RUN))
        while (verdict := run.read_verdict()) is None or verdict.state != "done":
            counts["jobs"] += 1
            if verdict is not None:
                assert "times without a new checkpoint" in verdict.reason, verdict
                counts["jobs after three kills in a row without a checkpoint"] += 1
            _job(run, chance, counts, until)
        _check(run, right)
        shutil.rmtree(run.path)
    return ", ".join(f"{number} {name}" for name, number in counts.items())


def _job(run: RunDir, chance: random.Random, counts: Counter[str], until: int) -> None:
    """Start the supervisors; kill until they have ended or `until` kills are reached in total."""
    run.create()
    begun, trained = len(_heartbeats(run)) + 2, _trainings(run)
    with _supervised(run) as (job, wait_for):
        # The loss of a node before its first heartbeat would go unnoticed.
        wait_for(lambda: len(_heartbeats(run)) == begun)
        while job.poll() is None and counts["kills"] < until:
            if chance.random() > AT_ONCE:
                wait_for(partial(_has_trained, run, trained))
            time.sleep(chance.random() * MAX_WAIT)
            trained = _trainings(run)
            if job.poll() is None and (kind := _kill(job, chance)):
                counts["kills"] += 1
                counts[f"of {kind}s"] += 1
                counts["while saving"] += any(run.checkpoints.glob(".saving-*"))
            counts["checkpoints verified"] += _verify(run)
        wait_for(lambda: False)
    counts["checkpoints verified"] += _verify(run)


@contextlib.contextmanager
def _supervised(run: RunDir) -> Iterator[tuple[Process, Callable[[Callable[[], bool]], None]]]:
    """Start a job; yield it and a function that waits for a condition or the end of the job."""
    command = [sys.executable, "-m", "launch", "supervise", "--run-dir", str(run.path), "--"]
    log = run.path.parent / f"{run.name}.log"
    with log.open("ab") as file:
        words = ["bash", "-c", JOB, "job", *command, *TRAIN]
        job = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)

    def wait_for(what: Callable[[], bool]) -> None:
        wait_until(lambda: what() or job.poll() is not None, TIMEOUT, lambda: f"see {log}")

    try:
        yield job, wait_for
    finally:
        if job.poll() is None:
            _end(psutil.Process(job.pid))
            job.wait()


def _kill(job: Process, chance: random.Random) -> str | None:
    """Kill a random process of the job; return its kind, or None if there is none of the kind."""
    kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
    found = [psutil.Process(job.pid)]
    for _ in range(list(KINDS).index(kind)):
        found = [child for parent in found for child in _children(parent)]
    if not found:
        return None
    victim = chance.choice(found)
    if kind in WHOLE:
        _end(victim)
    else:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    return kind


def _end(process: psutil.Process) -> None:
    """Kill a process and its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def _children(parent: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in parent.children() if child.status() != psutil.STATUS_ZOMBIE]
    return []


def _heartbeats(run: RunDir) -> list[Path]:
    return list(run.job.glob("heartbeats/*/node-*"))


def _has_trained(run: RunDir, before: int) -> bool:
    return _trainings(run) > before


def _trainings(run: RunDir) -> int:
    """Count how often the run has started to train."""
    return sum(line["event"] == "first_step" for line in read_lines(run.events))


def _verify(run: RunDir) -> int:
    """Check that every published checkpoint is complete; return their number."""
    count = 0
    for checkpoint in layout.published(run.checkpoints).values():
        with layout.reading(checkpoint), contextlib.suppress(FileNotFoundError):
            found = verify.problems(checkpoint)
            if checkpoint.exists():  # an older one may be deleted at any time
                assert not found, (checkpoint, found)
                count += 1
    return count


def _check(run: RunDir, right: str) -> None:
    """Check that the run has everything it must have, and nothing else."""
    assert _weights(run) == right, run.path
    assert [line["step"] for line in logged_steps(run)] == list(range(1, STEPS + 1)), run.path
    found = {path.name for path in run.path.iterdir()}
    assert found - {"forgotten.jsonl"} == FILES, list(run.path.iterdir())
    names = [path.name for path in run.checkpoints.iterdir()]
    assert len(names) == KEEP and all(name.startswith("step-") for name in names), names
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert not [path for path in files if path.name.startswith(".")], files
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
    wait_until(lambda: not _processes(run), 10, lambda: f"left over: {_processes(run)}")


def _processes(run: RunDir) -> list[psutil.Process]:
    def words(process: psutil.Process) -> str:
        return " ".join(process.info["cmdline"] or [])

    return [each for each in psutil.process_iter(["cmdline"]) if f"{run.path}" in words(each)]


def _weights(run: RunDir) -> str:
    return fingerprint.of_checkpoint(layout.place(run.checkpoints, STEPS))
