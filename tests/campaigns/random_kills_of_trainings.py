"""Kill random processes of whole trainings, as in a user's run.

Every run has two nodes of two ranks, on this machine or, with a lab, on a Slurm cluster. It trains
in exact mode, and saves most of the time. At random times a process is killed: `submit`, the first
process of the job, a supervisor, a fork server, an agent or a rank; or all processes of a node or
of the job. A job that ends before the run is done is submitted again with --resume.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
from checkout import ROOT
from lab import Lab, wait_until
from ranks import logged_steps, steps_without_a_line

from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.train.checkpoint import layout
from rollcall.train.checkpoint.tools import export, verify
from rollcall.train.exact import fingerprint

Process = subprocess.Popen[bytes]
STEPS, KEEP = 60, 2
SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py"), "--nodes=2", "--nproc-per-node=2"]
TRAIN = ["digits", "device=cpu", "model.name=mlp", "exact=true", "log.every=1"]
TRAIN += [f"train.steps={STEPS}", f"checkpoint.keep_last={KEEP}", "checkpoint.every=4"]
KINDS = {"submit": 1, "controller": 1, "supervisor": 2, "fork server": 1, "agent": 3, "rank": 4}
KINDS |= {"job": 1, "node": 2}
"""What is killed, with its weight in the random choice. Slurm's controller is a batch process."""
BELOW = {"fork server": 1, "agent": 2, "rank": 3}
"""How far a process is below its supervisor."""
WHOLE = {"job": "controller", "node": "supervisor"}
"""What is killed together with its descendants."""
AT_ONCE = 0.2
"""Fraction of the kills that do not wait until the run trains again after the previous kill."""
KILLS_PER_RUN = (4, 10)
"""Smallest and largest number of kills in a run; then it trains to its end."""
MAX_WAIT = 1.0
"""Most seconds until a kill."""
TIMEOUT = 500.0
FILES = {"checkpoints", "code", "config.yaml", "events.jsonl", "job", "logs"}
FILES |= {"metrics.jsonl", "verdict.json"}
"""The content of a finished run's directory."""


def campaign(kills: int, root: Path, seed: int, lab: Lab | None = None) -> str:
    """Kill this number of times, in one run after another; return a summary.

    Raises:
        AssertionError: something was lost, or files or processes were left over.
    """
    chance, counts = random.Random(seed), Counter[str]()
    whole = RunDir(root, "undisturbed")
    _job(whole, chance, counts, 0, lab)
    right = _weights(whole)
    _check(whole, right)
    counts.clear()
    while counts["kills"] < kills:
        counts["runs"] += 1
        run = RunDir(root, f"run-{counts['runs']}")
        until = min(kills, counts["kills"] + chance.randint(*KILLS_PER_RUN))
        while (verdict := run.read_verdict()) is None or verdict.state != "done":
            counts["jobs"] += 1
            if verdict is not None and verdict.state == "failed":
                assert "times without a new checkpoint" in verdict.reason, verdict
                counts["jobs after three kills in a row without a checkpoint"] += 1
            _job(run, chance, counts, until, lab)
        _check(run, right)
        shutil.rmtree(run.path)
    return ", ".join(f"{number} {name}" for name, number in counts.items())


def _job(
    run: RunDir, chance: random.Random, counts: Counter[str], until: int, lab: Lab | None
) -> None:
    """Submit the run; kill until it has ended or `until` kills are reached in total."""
    begun, trained, killed = len(_heartbeats(run)) + 2, _trainings(run), set[str]()
    with _submitted(run, lab) as (submit, wait_for):
        # The loss of a node before its first heartbeat would be noticed after minutes.
        wait_for(lambda: len(_heartbeats(run)) >= begun)
        while _is_live(run, submit) and counts["kills"] < until:
            if chance.random() > AT_ONCE:
                wait_for(partial(_has_trained, run, trained))
            time.sleep(chance.random() * MAX_WAIT)
            trained = _trainings(run)
            if kind := _kill(run, submit, chance):
                killed.add(kind)
                counts["kills"] += 1
                counts[f"of {kind}s"] += 1
                counts["while saving"] += any(run.checkpoints.glob(".saving-*"))
            counts["checkpoints verified"] += _verify(run)
        wait_for(lambda: False)
        verdict = run.read_verdict()
        has_begun = len(_heartbeats(run)) >= begun  # not so if an earlier job is still queued
        if has_begun and not killed & {"submit", "controller", "job"}:
            is_done = verdict is not None and verdict.state == "done"
            assert (submit.returncode == 0) == is_done, (submit.returncode, verdict, killed)
    counts["checkpoints verified"] += _verify(run)


@contextlib.contextmanager
def _submitted(
    run: RunDir, lab: Lab | None
) -> Iterator[tuple[Process, Callable[[Callable[[], bool]], None]]]:
    """Submit a run; yield `submit` and a function that waits for a condition or the run's end."""
    log = run.path.parent / f"{run.name}.log"
    place = [f"--root={run.path.parent}", f"--name={run.name}", "--wait"]
    words = [*SUBMIT, *place, *(["--resume"] if run.path.exists() else []), *TRAIN]
    command = lab.argv("login", *words) if lab else [*words, "--local"]
    with log.open("ab") as file:
        submit = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )

    def wait_for(condition: Callable[[], bool]) -> None:
        def is_over() -> bool:
            return condition() or not _is_live(run, submit)

        wait_until(is_over, TIMEOUT, lambda: f"see {log}")

    try:
        yield submit, wait_for
    finally:
        for process in _processes(run):
            _end(process)
        submit.kill()
        submit.wait()


def _is_live(run: RunDir, submit: Process) -> bool:
    return submit.poll() is None or bool(_processes(run))


def _kill(run: RunDir, submit: Process, chance: random.Random) -> str | None:
    """Kill a random process of the run; return its kind, or None if there is none of the kind."""
    kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
    victims = _of_kind(run, submit, WHOLE.get(kind, kind))
    if not victims:
        return None
    victim = chance.choice(victims)
    if kind in WHOLE:
        _end(victim)
    else:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    return kind


def _of_kind(run: RunDir, submit: Process, kind: str) -> list[psutil.Process]:
    """Return the processes of a kind."""
    if kind == "submit":
        return [psutil.Process(submit.pid)] if submit.poll() is None else []
    words = {"batch", "submitit.local._local"} if kind == "controller" else {"supervise"}
    processes = [each for each in _processes(run) if words & {*each.info["cmdline"]}]
    for _ in range(BELOW.get(kind, 0)):
        processes = [child for parent in processes for child in _children(parent)]
    return processes


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
    assert logged_steps(run)[-1]["step"] == STEPS and not steps_without_a_line(run), run.path
    names = {path.name for path in run.path.iterdir()}
    claims = {name for name in names if name.startswith("claim-")}
    assert len(claims) == 1, claims
    assert names - claims - {"forgotten.jsonl", "phases.jsonl"} == FILES, names
    kept = [path.name for path in run.checkpoints.iterdir()]
    assert len(kept) == KEEP and all(name.startswith("step-") for name in kept), kept
    files = [
        path for path in run.path.rglob("*") if path.is_file() and run.code not in path.parents
    ]
    assert not [path for path in files if path.name.startswith(".")], files
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
    wait_until(lambda: not _processes(run), 120, lambda: f"left over: {_processes(run)}")


def _processes(run: RunDir) -> list[psutil.Process]:
    path = re.compile(rf"{re.escape(str(run.path))}(?!\w)")
    processes = list(psutil.process_iter(["cmdline"]))
    return [each for each in processes if path.search(" ".join(each.info["cmdline"] or []))]


def _weights(run: RunDir) -> str:
    return fingerprint.of(export.read(layout.path_of(run.checkpoints, STEPS))["model"])
