"""`python -m train verify equal|resume|launch`: the proof that a change changed nothing.

The same run is trained in several ways in exact mode. Their weights must have one hash; where they
do not, the first difference is found and named. No torch: the runs are processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from train import config as schema
from train.config import ConfigError
from train.proof import difference
from train.run import RunDir, read_lines

SUBMIT = Path(__file__).parents[2] / "launch" / "submit.py"
USAGE = """\
python -m train verify equal|resume|launch [--ranks N,…] [recipe or file.yaml] [key=value …]
       python -m train verify runs DIRECTORY DIRECTORY …

equal   trains the same run on each of these numbers of ranks
resume  trains it whole, and stopped in the middle and resumed on another number of ranks
launch  starts it by python -m train, torchrun, srun (where Slurm answers) and submit.py
runs    compares runs that are there: from before and after a change, from two clusters

All are run with exact=true. The exit code is 1 if their weights differ."""


class VerifyError(RuntimeError):
    """A run could not be done to its end; the message says which and why."""


@dataclass(frozen=True)
class Way:
    """One way to do the same run.

    Attributes:
        name: for people.
        ranks: how many, in the order of the attempts.
        do: trains the run with these words to its end; takes words and the run's place.
    """

    name: str
    ranks: str
    do: Callable[[list[str], RunDir], None]


class Done(NamedTuple):
    """A run that was done, in which way and on how many ranks."""

    name: str
    ranks: str
    run_dir: RunDir


def main(words: Sequence[str]) -> int:
    """Do the runs, compare them, print a table; 0 if all are equal, 1 if not, 2 if refused."""
    parser = argparse.ArgumentParser(usage=USAGE, add_help=True, allow_abbrev=False)
    parser.add_argument("kind", choices=[*WAYS, "runs"])
    parser.add_argument("--ranks", type=_ranks, default=[1, 2, 4])
    options, rest = parser.parse_known_args(words)
    try:
        if options.kind == "runs":
            return report([_finished(Path(word)) for word in rest])
        return report(list(_do(options.kind, options.ranks, rest)))
    except ConfigError as error:
        print(f"rollcall: error: {error}", file=sys.stderr)
        return 2
    except VerifyError as error:
        print(f"rollcall: error: {error}", file=sys.stderr)
        return 1


def _do(kind: str, ranks: Sequence[int], words: Sequence[str]) -> Iterator[Done]:
    """Train in all ways of a kind, one after the other."""
    words = [*words, "exact=true", "log.fingerprints=true"]
    recipe, config = schema.parse(words)
    root = Path(config.run.root).absolute()
    name = config.run.name or f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number, way in enumerate(WAYS[kind](ranks)):
        run_dir = RunDir(root, f"{name}-{kind}-{number}")
        if run_dir.path.exists():
            raise ConfigError(f"{run_dir.path} is there already: choose another run.name")
        print(f"rollcall: {way.name}, ranks: {way.ranks}; run directory {run_dir.path}", flush=True)
        place = [f"run.name={run_dir.name}", f"run.root={json.dumps(str(root))}"]
        try:
            way.do([*words, *place], run_dir)
        except VerifyError as error:
            raise VerifyError(f"{way.name}: {error}") from None
        yield Done(way.name, way.ranks, run_dir)


def _finished(path: Path) -> Done:
    """A run that is there.

    Raises:
        ConfigError: it has no hash of its weights.
    """
    run_dir = RunDir(path.parent, path.name)
    events = list(read_lines(run_dir.events))
    if not any("weights" in line for line in events if line["event"] == "finished"):
        raise ConfigError(
            f"{path}: events.jsonl has no hash of weights: it is no run, or has not finished, or "
            "was not trained with exact=true"
        )
    ranks = [str(line["world_size"]) for line in events if line["event"] == "started"]
    return Done(str(path), ", then ".join(ranks), run_dir)


def report(done: Sequence[Done]) -> int:
    """Print how the runs compare with the first; 0 if all are equal, else 1."""
    if len(done) < 2:
        raise ConfigError("there is nothing to compare: at least two runs are needed")
    reference, *others = done
    rows = [("way", "ranks", "steps", "weights", ""), (*_row(reference), "")]
    unequal = []
    for other in others:
        equal = _outcome(other.run_dir) == _outcome(reference.run_dir)
        rows.append((*_row(other), "equal" if equal else "NOT EQUAL"))
        if not equal:
            unequal.append(other)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
    for other in unequal:
        print(f"\n{other.name} ({other.ranks}) differs from {reference.name} ({reference.ranks})")
        found = difference.first(reference.run_dir, other.run_dir)
        if found:
            print(f"  {found}\n  {found.blame}")
        else:
            print("  no step that both have fingerprints of differs (log.fingerprints=true)")
        for line in difference.circumstances(reference.run_dir, other.run_dir):
            print(f"  different: {line}")
    return 1 if unequal else 0


def equal(ranks: Sequence[int]) -> Iterator[Way]:
    """The same run on other numbers of ranks."""
    for count in ranks:
        yield Way("uninterrupted", str(count), partial(_train, ranks=count))


def resume(ranks: Sequence[int]) -> Iterator[Way]:
    """A whole run, then stopped ones that go on with another number of ranks."""
    few, many = min(ranks), max(ranks)

    def stop_and_resume(first: int, then: int) -> Way:
        def do(words: list[str], run_dir: RunDir) -> None:
            _train(words, run_dir, ranks=first, stop=True)
            _train(words, run_dir, ranks=then)

        return Way("stopped and resumed", f"{first}, then {then}", do)

    yield Way("uninterrupted", str(many), partial(_train, ranks=many))
    for pair in dict.fromkeys([(many, few), (few, many)]):
        yield stop_and_resume(*pair)


def launch(ranks: Sequence[int]) -> Iterator[Way]:
    """The same run by every way to start it that this machine has."""
    count = max(ranks)
    module = [sys.executable, "-m"]
    torchrun = [*module, "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    yield Way("python -m train", "1", partial(_start, [*module, "train"]))
    yield Way("torchrun", str(count), partial(_start, [*torchrun, "-m", "train"]))
    has_slurm = _slurm_answers()
    if has_slurm:
        srun = ["srun", f"--ntasks={count}", *module, "train"]
        yield Way("srun", str(count), partial(_start, srun))
    if SUBMIT.exists():
        submit = [sys.executable, str(SUBMIT), "--wait", f"--nproc-per-node={count}"]
        local = [] if has_slurm else ["--local"]
        yield Way(" ".join(["submit.py", *local]), str(count), partial(_start, [*submit, *local]))


WAYS = {"equal": equal, "resume": resume, "launch": launch}


def _ranks(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _row(done: Done) -> tuple[str, str, str, str]:
    steps, weights, _ = _outcome(done.run_dir)
    return done.name, done.ranks, str(steps), weights[:16]


def _outcome(run_dir: RunDir) -> tuple[int, str, float | None]:
    """Steps, hash of the weights and loss of the last evaluation."""
    events = {line["event"]: line for line in read_lines(run_dir.events)}
    finished = events["finished"]
    return finished["step"], finished["weights"], events.get("evaluated", {}).get("loss")


def _start(command: list[str], words: list[str], run_dir: RunDir) -> None:
    """Train by a launcher's command line."""
    _call([*command, *words], run_dir)


def _train(words: list[str], run_dir: RunDir, ranks: int, stop: bool = False) -> None:
    """Train on ranks of this machine, to the end or to a stop in the middle."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    logs = run_dir.path / "logs"
    command = [sys.executable, "-m", "train.agent", f"--nproc-per-node={ranks}"]
    command += [f"--master-port={port}", f"--run-id={run_dir.name}", f"--log-dir={logs}"]
    command += ["-m", "train", *words]
    _call(command, run_dir, stop)


def _call(command: list[str], run_dir: RunDir, stop: bool = False) -> None:
    """Run a command until it ends.

    Raises:
        VerifyError: the run did not come to its end, or could not be stopped in the middle.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        if stop:
            _stop_in_the_middle(process, run_dir)
        output, _ = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    verdict = run_dir.read_verdict()
    state = verdict.state if verdict else "nothing"
    if stop and state == "done":
        raise VerifyError("the run ended before it could be stopped: give it more train.steps")
    if state != ("requeue" if stop else "done"):
        logs = sorted(run_dir.path.glob("logs/**/rank-*.log"))
        told = output + "".join(log.read_text() for log in logs[:1])
        last = "\n".join(told.strip().splitlines()[-15:])
        raise VerifyError(f"exit code {process.returncode}, and its verdict is {state}\n{last}")


def _stop_in_the_middle(process: subprocess.Popen[str], run_dir: RunDir) -> None:
    """Ask all ranks to stop, as Slurm does, when half of the steps are done."""
    total = sys.maxsize
    fingerprints = run_dir.path / difference.FINGERPRINTS
    while process.poll() is None:
        for line in read_lines(run_dir.events):
            total = line.get("steps", total)
        if fingerprints.exists() and len(fingerprints.read_bytes().splitlines()) > total // 2:
            os.killpg(process.pid, signal.SIGTERM)
            return
        time.sleep(0.02)


def _slurm_answers() -> bool:
    if shutil.which("srun") is None or shutil.which("sinfo") is None:
        return False
    try:
        answer = subprocess.run(["sinfo", "--noheader"], capture_output=True, timeout=20)
    except subprocess.TimeoutExpired:
        return False
    return answer.returncode == 0 and bool(answer.stdout.strip())
