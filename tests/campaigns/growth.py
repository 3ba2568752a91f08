"""Measure commands and steps with more and more runs and ranks.

    PYTHONPATH=. python tests/campaigns/growth.py

For N = 10, 100 and 1,000, it creates N runs of Slurm, half of them live, N runs of this machine, of
which half have no recorded end, one run on N nodes with four ranks each, and a checkout with 20 N
files. Small scripts replace Slurm's commands. Then it submits a run on N nodes, shows the tables of
all runs, merges the logs of all ranks, and submits the checkout twice; all take turns, also with
loops that only read the records, or copy, hash and link the files: the floor. A second
table is about the work for all ranks in each exchange of a training step, without the exchange.
The exit code is 1 if a time grows faster than N.
"""

import argparse
import contextlib
import io
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from rollcall.cli.installation import command
from rollcall.config import parse
from rollcall.launch.doctor.storage import is_node_local
from rollcall.messages.text import duration
from rollcall.records.attempt import AttemptEvent, LogSizes
from rollcall.records.job import Submission, local_output
from rollcall.records.run import LoggedStep, Verdict
from rollcall.records.run_dir import RunDir
from rollcall.tools.bench import turns
from rollcall.train.health.replicas import FIRST_BIT, Fingerprints, Replicas
from rollcall.train.numerics import losses
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.profiling.phases import COLUMNS, PhaseTimes, Table
from rollcall.train.ranks.agreement import Step
from rollcall.train.ranks.run import Run
from rollcall.train.ranks.world import Place, World
from rollcall.train.torch_private import fake_store

SIZES = (10, 100, 1000)
RANKS, LINES, FILES = 4, 20, 20
"""Ranks per node; lines per log, each with a different time; files of the checkout per N."""
EXCHANGES = 20
STEP_RANKS = (16, 128, 1024, 16384)
SLURM = {
    "sbatch": """cat >/dev/null
[ "$1" = --test-only ] && echo "sbatch: Job 1 to start at 2030-01-01T00:00:00 using 1 \
processors on nodes n1 in partition main" >&2 && exit
echo "Submitted batch job $$"
""",
    "sinfo": "echo 'main*|{size}|1-infinite|infinite|up|8|16000|(null)|UNLIMITED'\n",
    "squeue": "cat {place}/queue\n",
    "sacct": "exit 1\n",
    "srun": "exit 1\n",
}
"""Shell lines that replace Slurm's commands."""
READ = """
import json, os, sys
for folder, _, names in os.walk(sys.argv[1]):
    for name in names:
        with open(f"{folder}/{name}") as file:
            for line in file:
                json.loads(line)
"""
"""The floor of `status`: a loop that parses each line of each file of the runs once."""
COPY = """
import hashlib, os, subprocess, sys
source, target, *copy = sys.argv[1:]
listed = subprocess.run(["git", "-C", source, "ls-files", "-z"], stdout=-1, text=True).stdout
for name in listed.split("\\0")[:-1]:
    os.makedirs(os.path.dirname(f"{target}/{name}"), exist_ok=True)
    if copy:
        os.lstat(f"{source}/{name}")
        os.link(f"{copy[0]}/{name}", f"{target}/{name}")
        continue
    with open(f"{source}/{name}", "rb") as reader, open(f"{target}/{name}", "xb") as writer:
        data = reader.read()
        hashlib.sha256(data).hexdigest()
        writer.write(data)
"""
"""The floor of a snapshot: a loop that copies and hashes, or only links, all tracked files."""
Way = Callable[[int], turns.Figures]


def main(argv: Sequence[str]) -> int:
    """Measure and print the tables; return the exit code."""
    words = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    words.add_argument("--repeats", type=turns.count, default=6, metavar="N")
    words.add_argument("--most", type=int, default=SIZES[-1], help=f"of {SIZES}", metavar="N")
    options = words.parse_args(argv)
    sizes = [size for size in SIZES if size <= options.most]
    # Not in a directory that only this machine sees, where no run on several nodes may be.
    places = [path for path in (Path("runs").absolute(), Path.home()) if not is_node_local(path)]
    if not places:
        sys.exit("expected a checkout or a home that is not on this machine alone")
    for name, text in turns.surroundings().items():
        print(f"{name}: {text}")
    (runs := places[0]).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".growth-", dir=runs) as folder:
        ways: dict[tuple[str, int], Way] = {}
        for size in sizes:
            _make(Path(folder, str(size)), size)
            for name, way in _ways(Path(folder, str(size)), size).items():
                ways[name, size] = way
        title = f"N runs, nodes and files / {FILES}, medians of {options.repeats}"
        are_linear = _measure(title, ways, options.repeats)
    print()
    title = "N ranks, the work of rank 0 in each exchange"
    steps = {("an exchange", ranks): partial(_exchange, ranks) for ranks in STEP_RANKS}
    return 0 if _measure(title, steps, options.repeats) and are_linear else 1


def _measure(title: str, ways: Mapping[tuple[str, int], Way], repeats: int) -> bool:
    """Print medians; return whether no CPU time grows faster than N."""
    order = sorted(ways)
    named = {f"{name}, N = {size:,}": ways[name, size] for name, size in order}
    found = turns.take_turns(named, repeats, is_ordered=True)
    is_linear, first = True, dict[str, tuple[list[float], int]]()
    rows: list[Sequence[str]] = [("", "CPU", "clock", "CPU, as a multiple")]
    for (name, size), (label, figures) in zip(order, found.items(), strict=True):
        cpu = turns.column(figures, "CPU")
        base, least = first.setdefault(name, (cpu, size))
        multiples = turns.ratios(cpu, base)
        is_linear &= statistics.median(multiples) <= size / least
        times = [turns.cell(turns.column(figures, key), duration) for key in ("CPU", "clock")]
        rows.append((label, *times, turns.cell(multiples, "{:.1f}".format)))
    turns.show(title, rows)
    return is_linear


def _ways(place: Path, size: int) -> dict[str, Way]:
    """Return the commands for one N: each gets the number of the turn."""

    def timed(*words: str, cwd: Path | None = None) -> turns.Figures:
        return turns.timed(command(*words), place / "bin", cwd)

    def submit(number: int, name: str) -> turns.Figures:
        root = f"--root={place / f'copies-{number}'}"
        return timed("submit", f"--name={name}", root, "--", "main.py", cwd=place / "checkout")

    def plain(script: str, *words: object) -> turns.Figures:
        return turns.timed([sys.executable, "-c", script, *map(str, words)])

    def copy(number: int) -> Path:
        return place / f"plain-{number}"

    checkout = place / "checkout"
    return {
        "submit": lambda number: timed(
            "submit", f"--nodes={size}", f"--name=new-{number}", f"--root={place / 'new'}"
        ),
        "status": lambda _: timed("status", f"--root={place / 'slurm'}"),
        "status of local runs": lambda _: timed("status", f"--root={place / 'local'}"),
        "status of local runs, floor": lambda _: plain(READ, place / "local"),
        "logs --merge": lambda _: timed("logs", "wide", "--merge", f"--root={place}"),
        "submit a checkout": lambda number: submit(number, "first"),
        "submit a checkout, floor": lambda number: plain(COPY, checkout, copy(number)),
        "submit it again": lambda number: submit(number, "again"),
        "submit it again, floor": lambda number: plain(
            COPY, checkout, f"{copy(number)}-again", copy(number)
        ),
    }


def _make(place: Path, size: int) -> None:
    (place / "bin").mkdir(parents=True)
    (place / "new").mkdir()
    for name, text in SLURM.items():
        (place / "bin" / name).write_text(f"#!/bin/sh\n{text.format(size=size, place=place)}")
        (place / "bin" / name).chmod(0o755)
    for number in range(size):
        is_done, job = number % 2 == 0, str(number + 1)
        _run(RunDir(place / "slurm", f"run-{number}"), job, ["n1", "n2"], is_done)
        local = RunDir(place / "local", f"run-{number}")
        _run(local, job, [socket.gethostname()], is_done)
        local_output(local.job, job, 0).touch()
    live = range(2, size + 1, 2)
    rows = [f"{job}|{job}|RUNNING|None|2030-01-01T00:00:00|2" for job in live]
    (place / "queue").write_text("\n".join(rows) + "\n")
    wide = RunDir(place, "wide")
    _run(wide, str(size + 1), [f"n{number}" for number in range(size)], is_done=True)
    for node in range(size):
        _logs(wide, node)
    for number in range(FILES * size):
        file = place / "checkout" / f"package_{number // 100}" / f"module_{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"NUMBER = {number}\n" * 100)
    (place / "checkout" / "main.py").write_text("print('done')\n")
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=place / "checkout", check=True)


def _run(run: RunDir, job: str, hosts: list[str], is_done: bool) -> None:
    run.job.mkdir(parents=True)
    Submission(job, 0.0).append(run.path)
    begun = AttemptEvent(0, job, "started", 1.0, hosts=hosts, ranks=RANKS * len(hosts))
    begun.append(run.path)
    if is_done:
        AttemptEvent(0, job, "ended", 9.0, state="finished").append(run.path)
        Verdict("done", 20, "20 steps trained").write(run.path)
    run.record("first_step", step=1, steps=LINES)
    for step in range(1, LINES + 1):
        LoggedStep(step, 0.5, 1000.0, 2.0 + step).append(run.path)


def _logs(run: RunDir, node: int) -> None:
    folder = run.log(0, node, 0).parent
    folder.mkdir(parents=True)
    ranks = range(RANKS * node, RANKS * (node + 1))
    text = [f"step {number:4}/{LINES}  loss 0.5\n" for number in range(LINES)]
    for rank in ranks:
        run.log(0, node, rank).write_text("".join(text))
    for at in range(LINES):  # one line per second
        sizes = {str(rank): (at + 1) * len(text[0]) for rank in ranks}
        LogSizes(float(at), sizes).append(folder)


def _exchange(ranks: int, _: int) -> turns.Figures:
    """Let rank 0 compare the numbers of all ranks, of which eight hold one copy of the model."""
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=ranks)
    try:
        config = parse(["digits", "parallel.strategy=hsdp", f"data.global_batch={ranks}"])[1]
        place = Place("growth", world_size=ranks, local_world_size=8)
        run = Run(config, World(place, torch.device("cpu")), RunDir("runs", "growth"))
        strategy = Strategy(config, run.world, losses.Objective(losses.of(config)))
        run.progress.steps = sys.maxsize
        phases, replicas = PhaseTimes(run, lambda *_: None), Replicas(run, strategy)
        table = Table([1 + at / ranks / 4 for at in range(ranks * COLUMNS)])
        fingerprints = Fingerprints([float(FIRST_BIT + rank % 8) for rank in range(ranks)])
        for step in range(2 * EXCHANGES):
            if step == EXCHANGES:
                clock, cpu = time.perf_counter(), time.process_time()
            with contextlib.redirect_stdout(io.StringIO()):  # what it says of late ranks
                about = Step(step, 1, 0.01, False, 0.5, 1.0, float(ranks), True)
                phases.settle(about, table)
                replicas.settle(about, fingerprints)
        phases.fields()  # a line of metrics.jsonl
        taken = time.process_time() - cpu, time.perf_counter() - clock
        return {"CPU": taken[0] / EXCHANGES, "clock": taken[1] / EXCHANGES}
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
