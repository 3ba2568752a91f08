"""`rollcall stacks RUN`: show the Python stack of every rank of a live run, without stopping it.

This needs neither root nor a debugger: every rank has registered Python's faulthandler, which
answers a signal even while the rank waits in native code. Ranks with the same stack are shown once.
"""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from rollcall.installation import ROOT
from rollcall.launch.commands.stacks_on_node import dump
from rollcall.launch.runs import find, states
from rollcall.launch.runs.find import SubmittedJob
from rollcall.launch.runs.log_times import nodes_of_ranks
from rollcall.launch.scheduler import slurm
from rollcall.launch.scheduler.slurm import SlurmError
from rollcall.records.attempt import AttemptRecord
from rollcall.run_dir import RunDir

OURS = re.compile(r'"<frozen runpy>"|/launch/rank/\w+\.py"')
"""A frame of the launcher; so are all frames below it."""


def main(argv: Sequence[str]) -> int:
    """Print the stacks; return the exit code, 1 if a rank did not answer."""
    options = find.parser("stacks", __doc__).parse_args(argv)
    run = find.find_one(options.run, options.root)
    job, attempt = states.live_attempt(run)
    answers = _ask(run, job, attempt)
    found: dict[str, list[int]] = {}
    for rank, stack in sorted(answers.items()):
        found.setdefault(_without_launcher(stack), []).append(rank)
    nodes = nodes_of_ranks(run.attempt_logs(attempt.number))
    places = {rank: attempt.hosts[node] for rank, node in nodes.items()}
    missing = sorted(set(range(attempt.ranks)) - set(answers))
    if missing:
        found["no answer: still starting, already ended, or hanging in the kernel"] = missing
    for text, ranks in found.items():
        print(f"{_names(ranks, places)}:")
        print("".join(f"  {line}\n" for line in text.splitlines()))
    return 1 if missing else 0


def _without_launcher(stack: str) -> str:
    """Remove the launcher's frames, and the numbers of threads, which differ between ranks."""
    lines = []
    is_ours = False
    for line in stack.splitlines(keepends=True):
        is_ours = line.startswith("  ") and (is_ours or OURS.search(line) is not None)
        if not is_ours:
            lines.append(re.sub(r" ?0x[0-9a-f]+", "", line))
    return "".join(lines)


def _ask(run: RunDir, job: SubmittedJob, attempt: AttemptRecord) -> dict[int, str]:
    logs = run.attempt_logs(attempt.number)
    stacks: dict[int, str] = {}
    if job.is_local:
        for node in range(len(attempt.hosts)):
            stacks |= dump(logs, node)
        return stacks
    command = [*slurm.on_groups(job.id, attempt.hosts), f"--chdir={ROOT}"]
    command += [sys.executable, "-m", "rollcall.launch.commands.stacks_on_node", str(logs)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0 and not answer.stdout:
        raise SlurmError(f"srun failed: {answer.stderr.strip()}")
    for line in answer.stdout.splitlines():
        rank, _, text = line.partition("\t")
        stacks[int(rank)] = stacks.get(int(rank), "") + text + "\n"
    return stacks


def _names(ranks: Sequence[int], places: Mapping[int, str]) -> str:
    names = dict.fromkeys(places.get(rank, "no node yet") for rank in ranks)
    label = "rank" if len(ranks) == 1 else "ranks"
    return f"{label} {', '.join(map(str, ranks))} on {', '.join(names)}"
