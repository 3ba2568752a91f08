"""`python -m launch stacks RUN`: the Python stack of every rank of a live run, which goes on.

No root and no debugger is needed: train.ranks has registered Python's faulthandler in every rank,
which answers at a signal also while the rank waits in native code. Ranks with the same stack are
shown once.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launch import runs, slurm, states
from launch.dump import dump
from launch.runs import Attempt, Job, NoRunError
from launch.slurm import SlurmError
from train.run import RunDir

ROOT = Path(__file__).resolve().parent.parent
OURS = re.compile(r'"<frozen runpy>"|/train/(agent|elastic|ranks)\.py"|/launch/guest\.py"')
"""A frame below which only the launcher's are."""


def main(argv: Sequence[str]) -> int:
    """Print the stacks; return the exit code: 1 if some rank did not answer."""
    options = runs.parser("stacks", __doc__).parse_args(argv)
    try:
        run = runs.find(options.run, options.root)
        job, attempt = states.live_attempt(run)
        answers = _ask(run, job, attempt)
    except (NoRunError, SlurmError) as error:
        return runs.refuse("stacks", error)
    found: dict[str, list[int]] = {}
    for rank, stack in sorted(answers.items()):
        found.setdefault(_essence(stack), []).append(rank)
    missing = sorted(set(range(attempt.ranks)) - set(answers))
    if missing:
        found["no answer: they still start, have ended, or hang in the kernel"] = missing
    for text, ranks in found.items():
        print(f"{_names(ranks, attempt)}:")
        print("".join(f"  {line}\n" for line in text.splitlines()))
    return 1 if missing else 0


def _essence(stack: str) -> str:
    """A rank's stacks without the launcher's own frames, which all ranks begin with.

    Without the numbers of threads too: only by them do ranks differ that are at the same place.
    """
    lines = []
    is_ours = False
    for line in stack.splitlines(keepends=True):
        is_ours = line.startswith("  ") and (is_ours or OURS.search(line) is not None)
        if not is_ours:
            lines.append(re.sub(r" ?0x[0-9a-f]+", "", line))
    return "".join(lines)


def _ask(run: RunDir, job: Job, attempt: Attempt) -> dict[int, str]:
    """The stacks of all ranks that answer, on all nodes.

    Raises:
        SlurmError: srun does not get there.
    """
    logs = run.log(attempt.number, 0, 0).parent.parent
    stacks: dict[int, str] = {}
    if job.is_local:
        for node in range(len(attempt.hosts)):
            stacks |= dump(logs, node)
        return stacks
    command = [*slurm.step(job.id, attempt.hosts), f"--chdir={ROOT}"]
    command += [sys.executable, "-m", "launch.dump", str(logs)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0 and not answer.stdout:
        raise SlurmError(f"srun fails: {answer.stderr.strip()}")
    for line in answer.stdout.splitlines():
        rank, _, text = line.partition("\t")
        stacks[int(rank)] = stacks.get(int(rank), "") + text + "\n"
    return stacks


def _names(ranks: Sequence[int], attempt: Attempt) -> str:
    per_node = attempt.ranks // len(attempt.hosts)
    names = dict.fromkeys(attempt.hosts[rank // per_node] for rank in ranks)
    label = "rank" if len(ranks) == 1 else "ranks"
    return f"{label} {', '.join(map(str, ranks))} on {', '.join(names)}"
