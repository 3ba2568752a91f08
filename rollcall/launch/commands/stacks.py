"""`rollcall stacks RUN`: show the Python stack of every rank of a live run, without stopping it.

This needs neither root nor a debugger: every rank has registered Python's faulthandler, which
answers a signal even while the rank waits in native code. Ranks with the same stack are shown once.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from rollcall.cli.installation import ROOT
from rollcall.launch.node.processes import SignalDelivery
from rollcall.launch.rank.process import STACK_FILE, STACK_SIGNAL
from rollcall.launch.runs import find, states
from rollcall.launch.runs.output import nodes_of_ranks
from rollcall.launch.scheduler import slurm
from rollcall.records.attempt import AttemptRecord
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_whole

IN_MEMORY = re.compile("/memfd:" + STACK_FILE.format(r"(\d+)") + " ")
"""The link in /proc to the file in memory to which a rank writes its stacks."""
PATIENCE = 5.0
"""Seconds that a rank has to answer."""
OURS = re.compile(r'"<frozen runpy>"|/launch/rank/\w+\.py"')
"""A frame of the launcher; so are all frames below it."""


def main(argv: Sequence[str]) -> int:
    """Print the stacks; return the exit code, 1 if a rank did not answer."""
    options = find.parser("stacks", __doc__).parse_args(argv)
    run = find.find_one(options.run, options.root)
    job, attempt = states.live_attempt(run)
    answers = _ask(run, job, attempt)
    by_stack: dict[str, list[int]] = {}
    for rank, stack in sorted(answers.items()):
        by_stack.setdefault(_without_launcher(stack), []).append(rank)
    nodes = nodes_of_ranks(run.attempt_logs(attempt.number))
    hosts = {rank: attempt.hosts[node] for rank, node in nodes.items()}
    missing = sorted(set(range(attempt.ranks)) - set(answers))
    if missing:
        by_stack["no answer: still starting, already ended, or hanging in the kernel"] = missing
    for text, ranks in by_stack.items():
        print(f"{_names(ranks, hosts)}:")
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


def _ask(run: RunDir, job: find.SubmittedJob, attempt: AttemptRecord) -> dict[int, str]:
    logs = run.attempt_logs(attempt.number)
    stacks: dict[int, str] = {}
    if job.is_local:
        for node in range(len(attempt.hosts)):
            stacks |= dump(logs, node)
        return stacks
    command = [*slurm.on_groups(job.id, attempt.hosts), f"--chdir={ROOT}"]
    command += [sys.executable, "-m", "rollcall.launch.commands.stacks", str(logs)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0 and not answer.stdout:
        raise slurm.SlurmError(f"srun failed: {answer.stderr.strip()}")
    for line in answer.stdout.splitlines():
        rank, _, text = line.partition("\t")
        stacks[int(rank)] = stacks.get(int(rank), "") + text + "\n"
    return stacks


def _names(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    names = dict.fromkeys(hosts.get(rank, "no node yet") for rank in ranks)
    label = "rank" if len(ranks) == 1 else "ranks"
    return f"{label} {', '.join(map(str, ranks))} on {', '.join(names)}"


def dump(logs: Path, node: int) -> dict[int, str]:
    """Return the stacks of the ranks that answer, by rank; this host must be the node."""
    files = _files((logs / f"node-{node}").resolve())
    sizes = {pid: path.stat().st_size for pid, (_, path) in files.items()}
    request = SignalDelivery(STACK_SIGNAL)
    request.deliver(dict.fromkeys(files, 0.0))
    end = time.monotonic() + PATIENCE
    texts = {files[pid][0]: _read(files[pid][1], sizes[pid], end) for pid in request.reached}
    return {rank: text for rank, text in texts.items() if text}


def ranks_of(logs: Path) -> dict[int, int]:
    """Return the ranks on this host that write their logs into this directory, by process id."""
    return {pid: rank for pid, (rank, _) in _files(logs.resolve()).items()}


def _files(logs: Path) -> dict[int, tuple[int, Path]]:
    """Return rank and stack file of the ranks that write their logs there, by process id."""
    files, parents = {}, {}
    for process in psutil.process_iter(["ppid"]):
        if (stack_file := _file(process.pid, logs)) is not None:
            files[process.pid], parents[process.pid] = stack_file, process.info["ppid"]
    # Data workers are forked from ranks and have the file too; a rank's parent has none.
    return {pid: stack_file for pid, stack_file in files.items() if parents[pid] not in files}


def _file(pid: int, logs: Path) -> tuple[int, Path] | None:
    with contextlib.suppress(OSError):  # another user's, or it has just ended
        if Path(f"/proc/{pid}/fd/1").readlink().parent == logs:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                if match := IN_MEMORY.match(str(entry.readlink())):
                    return int(match[1]), entry
    return None


def _read(path: Path, start: int, end: float) -> str:
    """Return the text of a file after its first `start` bytes, once it stops growing."""
    seen = start
    with contextlib.suppress(FileNotFoundError):
        while time.monotonic() < end:
            size = path.stat().st_size
            if size > start and size == seen:
                return read_whole(path)[start:].decode(errors="replace")
            seen = size
            time.sleep(0.05)
    return ""


if __name__ == "__main__":
    for rank, stack in dump(Path(sys.argv[1]), int(os.environ["SLURM_NODEID"])).items():
        for line in stack.splitlines():  # srun mixes the nodes' output, but keeps short lines whole
            print(f"{rank}\t{line}")
