"""Random kills of whole trainings: supervisors, agents and ranks as a user's run has them.

Every run has two simulated nodes of two ranks, in exact mode, and a save in flight most of the
time. At random moments a rank is killed, an agent, the process that an agent is forked from, all
that a node has, or the whole job. What the supervisors do not start again, another job does.
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

from train.checkpoint import shelf, verify
from train.proof import fingerprint
from train.run import RunDir, read_lines

ROOT = Path(__file__).parents[1]
Process = subprocess.Popen[bytes]
STEPS, KEEP = 60, 2
TRAIN = ["-m", "train", "digits", "device=cpu", "model.name=mlp", "exact=true", "log.every=1"]
TRAIN += [f"train.steps={STEPS}", f"checkpoint.keep={KEEP}", "checkpoint.every=4"]
JOB = """
export SUBMITIT_LOCAL_JOB_ID=$$ SUBMITIT_LOCAL_NTASKS=2
for node in 0 1; do SUBMITIT_LOCAL_GLOBALID=$node "$@" & done
wait
"""
"""The nodes of a local job, as submitit starts them: the shell is its controller."""
KINDS = {"job": 1, "node": 2, "warm parent": 1, "agent": 3, "rank": 4}
"""What is killed, each the parent of the next; how often, of eleven times."""
WHOLE = ("job", "node")
"""What is killed with all below it."""
AT_ONCE = 0.2
"""How often a kill does not wait until the run trains again after the last one."""
IN_A_RUN = (4, 10)
"""How many kills in a run; then it goes on to its end."""
LONGEST = 1.0
"""Seconds until a kill, at most."""
TIMEOUT = 120.0
BELONGS = {"checkpoints", "claim", "config.yaml", "events.jsonl", "job", "logs", "metrics.jsonl"}
BELONGS |= {"verdict.json"}
"""What is in the directory of a run that is done."""


def campaign(kills: int, root: Path, seed: int) -> str:
    """Kill so many times, in one run after another; return what happened.

    Raises:
        AssertionError: something was lost or left behind.
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
        until = min(kills, counts["kills"] + chance.randint(*IN_A_RUN))
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
    """Start the supervisors and kill until they have ended, or so much was killed."""
    run.create()
    begun, trained = len(_heartbeats(run)) + 2, _trainings(run)
    with _supervised(run) as (job, wait_for):
        # A node that dies before its first heartbeat is not missed.
        wait_for(lambda: len(_heartbeats(run)) == begun)
        while job.poll() is None and counts["kills"] < until:
            if chance.random() > AT_ONCE:
                wait_for(partial(_has_trained, run, trained))
            time.sleep(chance.random() * LONGEST)
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
    """A job of the run; and how to wait in it, until something holds or the job has ended."""
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
    """Kill something of the job; what it was, None if the job has nothing of the kind now."""
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
    """Kill a process and all below it."""
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
    """How often the run has begun to train."""
    return sum(line["event"] == "first_step" for line in read_lines(run.events))


def _verify(run: RunDir) -> int:
    """See that every published checkpoint is whole; how many there are."""
    count = 0
    for checkpoint in shelf.published(run.checkpoints).values():
        with shelf.reading(checkpoint), contextlib.suppress(FileNotFoundError):
            found = verify.problems(checkpoint)
            if checkpoint.exists():  # an older one may go at any moment
                assert not found, (checkpoint, found)
                count += 1
    return count


def _check(run: RunDir, right: str) -> None:
    """See that the run has all it must have, and nothing else."""
    assert _weights(run) == right, run.path
    assert [line["step"] for line in read_lines(run.metrics)] == list(range(1, STEPS + 1)), run.path
    assert {path.name for path in run.path.iterdir()} == BELONGS, list(run.path.iterdir())
    names = [path.name for path in run.checkpoints.iterdir()]
    assert len(names) == KEEP and all(name.startswith("step-") for name in names), names
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert not [path for path in files if path.name.startswith(".")], files
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
    wait_until(lambda: not _processes(run), 10, lambda: f"left: {_processes(run)}")


def _processes(run: RunDir) -> list[psutil.Process]:
    def words(process: psutil.Process) -> str:
        return " ".join(process.info["cmdline"] or [])

    return [each for each in psutil.process_iter(["cmdline"]) if f"{run.path}" in words(each)]


def _weights(run: RunDir) -> str:
    return fingerprint.of_checkpoint(shelf.place(run.checkpoints, STEPS))
