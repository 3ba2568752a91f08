"""`rollcall verify equal|resume [recipe or file.yaml] [key=value …]`, `verify runs DIRECTORY …`.

Train the same run in several ways with exact=true, and check that the weights are equal to the
last bit. If they are not, report the first step and tensor that differ.

  equal   trains on each of several numbers of ranks
  resume  trains without interruption; then stops in the middle and resumes on fewer or more ranks
  runs    compares existing runs, for example from before and after a change

The exit code is 0 if the weights are equal, 1 if they differ or a run fails, and 2 if the request
is refused.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollcall import config as schema
from rollcall.cli.installation import TRAIN, command, environment
from rollcall.cli.parser import parser
from rollcall.config import ConfigError
from rollcall.messages.text import table
from rollcall.records.run_dir import RunDir
from rollcall.train.exact import difference


class VerifyError(RuntimeError):
    """A run failed or could not be stopped; the message says which run and why."""


class Way(NamedTuple):
    """One way to train the same run."""

    name: str
    attempts: Sequence[int]  # ranks of each; all but the last are asked to stop in the middle

    @property
    def ranks(self) -> str:
        """The numbers of ranks in words, such as "4, then 1"."""
        return ", then ".join(map(str, self.attempts))


class Finished(NamedTuple):
    """A finished run, how it was trained, and on how many ranks."""

    name: str
    ranks: str
    run_dir: RunDir


def main(words: Sequence[str]) -> int:
    """Train the runs, compare them and print a table; return the exit code."""
    asked = parser("verify", __doc__)
    asked.add_argument("kind", choices=[*WAYS, "runs"], help="see above")
    ranks = "numbers of ranks (default: 1,2,4); resume uses the smallest and the largest"
    asked.add_argument("--ranks", type=_ranks, default=[1, 2, 4], metavar="N,…", help=ranks)
    options, rest = asked.parse_known_args(words)
    try:
        if options.kind == "runs":
            return report([_existing(Path(word)) for word in rest])
        return report(list(_train_all(options.kind, options.ranks, rest)))
    except (ConfigError, VerifyError) as error:
        print(f"rollcall: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:  # such as a read-only folder of runs
        print(f"rollcall: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def _train_all(kind: str, ranks: Sequence[int], words: Sequence[str]) -> Iterator[Finished]:
    words = [*words, "exact=true", "log.fingerprints=true"]
    recipe, config = schema.parse(words)
    root = Path(config.run.root).absolute()
    name = config.run.name or f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number, way in enumerate(WAYS[kind](ranks)):
        run_dir = RunDir(root, f"{name}-{kind}-{number}")
        if run_dir.path.exists():
            raise ConfigError(f"{run_dir.path} already exists: choose another run.name")
        print(f"rollcall: {way.name}, ranks: {way.ranks}, run directory {run_dir.path}", flush=True)
        try:
            for attempt, count in enumerate(way.attempts, 1):
                started = command("supervise", f"--nproc-per-node={count}", "--max-restarts=0")
                line = [*started, "--", *TRAIN, *words, *run_dir.words]
                _run_to_end(line, run_dir, stop=attempt < len(way.attempts))
        except VerifyError as error:
            raise VerifyError(f"{way.name}: {error}") from None
        yield Finished(way.name, way.ranks, run_dir)


def _existing(path: Path) -> Finished:
    run_dir = RunDir(path.parent, path.name)
    events = run_dir.read_events()
    finished = [line for line in events if line["event"] == "finished"]
    if not finished or not {"step", "weights"} <= finished[-1].keys():
        advice = "expected the directory of a finished run with exact=true"
        raise ConfigError(f"{path}: events.jsonl has no hash of the final weights; {advice}")
    ranks = [str(line.get("world_size")) for line in events if line["event"] == "started"]
    return Finished(str(path), ", then ".join(ranks), run_dir)


def report(runs: Sequence[Finished]) -> int:
    """Print how the runs compare with the first one; return 0 if all are equal, otherwise 1."""
    if len(runs) < 2:
        raise ConfigError(f"expected at least two runs to compare, got {len(runs)}")
    reference, *others = runs
    expected = _result(reference.run_dir)
    unequal = [other for other in others if _result(other.run_dir) != expected]
    rows = [("way", "ranks", "steps", "weights", ""), (*_row(reference), "")]
    rows += [(*_row(other), "NOT EQUAL" if other in unequal else "equal") for other in others]
    print("\n".join(table(rows)))
    for other in unequal:
        print(f"\n{other.name} ({other.ranks}) differs from {reference.name} ({reference.ranks})")
        if first := difference.first(reference.run_dir, other.run_dir):
            print(f"  {first}\n  {first.likely_cause}")
        else:
            print("  no step with fingerprints in both runs differs (see log.fingerprints)")
    return 1 if unequal else 0


def equal(ranks: Sequence[int]) -> list[Way]:
    """Train on each number of ranks."""
    return [Way("uninterrupted", [count]) for count in ranks]


def resume(ranks: Sequence[int]) -> list[Way]:
    """Train without a stop, and with a stop and a resume on a different number of ranks."""
    few, many = min(ranks), max(ranks)
    pairs = dict.fromkeys([(many, few), (few, many)])
    return [*equal([many]), *(Way("stopped and resumed", pair) for pair in pairs)]


WAYS = {"equal": equal, "resume": resume}


def _ranks(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"expected numbers such as 1,2,4, got '{text}'")
    return [int(part) for part in text.split(",")]


def _row(run: Finished) -> tuple[str, str, str, str]:
    steps, weights, _ = _result(run.run_dir)
    return run.name, run.ranks, str(steps), weights[:16]


def _result(run_dir: RunDir) -> tuple[int, str, float | None]:
    """Return the number of steps, the hash of the weights and the loss of the last evaluation."""
    events = {line["event"]: line for line in run_dir.read_events()}
    finished = events["finished"]
    return finished["step"], finished["weights"], events.get("evaluated", {}).get("loss")


def _run_to_end(line: list[str], run_dir: RunDir, stop: bool) -> None:
    """Run a command until it exits; with `stop`, ask the run to stop after half of its steps."""
    env = environment()
    for name in ("SLURM_STEP_ID", "SUBMITIT_LOCAL_JOB_ID"):  # it starts no part of that job
        env.pop(name, None)
    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(line, env=env, start_new_session=True, **output)
    try:
        if stop:
            _stop_in_the_middle(process, run_dir)
        printed, _ = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    verdict = run_dir.read_verdict()
    state = verdict.state if verdict else "missing"
    if stop and state == "done":
        raise VerifyError("the run finished before it could be stopped: raise train.steps")
    if state not in (("requeue", "stopped") if stop else ("done",)):
        logs = sorted(run_dir.path.glob("logs/**/rank-*.log"))
        text = printed + "".join(log.read_text() for log in logs[:1])
        last = "\n".join(text.strip().splitlines()[-15:])
        raise VerifyError(f"exit code {process.returncode}, verdict {state}; last output:\n{last}")


def _stop_in_the_middle(process: subprocess.Popen[str], run_dir: RunDir) -> None:
    total = sys.maxsize
    fingerprints = run_dir.path / difference.FINGERPRINTS
    while process.poll() is None:
        for line in run_dir.read_events():
            total = line.get("steps", total)
        enough = max(1, total // 2)
        if fingerprints.exists() and len(fingerprints.read_bytes().splitlines()) >= enough:
            os.killpg(process.pid, signal.SIGTERM)
            return
        time.sleep(0.02)
