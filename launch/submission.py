"""What does a submission ask for? Command line to job, checked before anything is written.

This is all that a dry run needs, so nothing here imports submitit, psutil or torch.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch import slurm, snapshot
from launch.job import RANKS_WITHOUT_GPU, Job, JobError, render
from launch.slurm import SlurmError
from launch.snapshot import Snapshot, SnapshotError
from launch.words import word
from train.config import ConfigError, parse
from train.run import RunDir

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = """\
examples:
  submit.py                                      the default recipe, on one node
  submit.py --nodes 2 --gpus-per-node 4 --time 2:00:00 mnist optim.lr=3e-4
  submit.py --local --nodes 2 --wait             two simulated nodes on this machine
  submit.py --nodes 2 --name mine                submit it again to continue where it stopped
"""


class RefusedError(Exception):
    """The request cannot be met; nothing has been written."""


@dataclass(frozen=True, eq=False, repr=False)
class Submission:
    """Everything that starting a run needs.

    Attributes:
        argv: the command line, word by word.
        recipes: recipe files of the user's own, which the run gets a copy of.
        code: what to copy as the run's code; None if the run has its code already.
        script: the job as sbatch takes it.
        wait: whether to follow the run to its end.
    """

    argv: tuple[str, ...]
    run: RunDir
    recipes: tuple[Path, ...]
    code: Snapshot | None
    job: Job
    script: str
    wait: bool


def main(argv: Sequence[str]) -> int:
    """Do what the command line asks; return the exit code."""
    options = _parser().parse_args(argv)
    try:
        submission = _plan(options, argv)
        local = options.local or not slurm.is_available()
        if options.dry_run:
            _show(submission, local)
            return 0
        from launch import start  # here, because it imports submitit

        if local and not options.local:
            note("there is no sbatch here: the run starts on this machine")
        return start.on_this_machine(submission) if local else start.on_slurm(submission)
    except (RefusedError, ConfigError, JobError, SlurmError, SnapshotError) as error:
        for line in str(error).splitlines():
            print(f"submit: error: {line}", file=sys.stderr)
        return 2


def note(text: str) -> None:
    """Tell the user what may surprise."""
    print(f"submit: note: {text}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="submit.py",
        description="Start a run on Slurm where there is one, otherwise on this machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nodes", type=_positive, default=1, metavar="N", help="hosts (default: 1)")
    ranks = f"ranks on each node (default: one per GPU, {RANKS_WITHOUT_GPU} where there is none)"
    add("--nproc-per-node", type=_positive, metavar="K", help=ranks)
    add("--gpus-per-node", type=_positive, metavar="G", help="GPUs on each node (default: none)")
    cpus = "CPUs for each node's ranks together (default: one per rank)"
    add("--cpus-per-task", type=_positive, metavar="C", help=cpus)
    add("--mem", help="memory on each node, such as 64G")
    add("--time", type=_time, help=f"time limit: {slurm.TIME_FORMATS}")
    add("--partition", metavar="P")
    add("--account", metavar="A")
    add("--qos", metavar="Q")
    name = "name of the run (default: recipe, date and time); a run that is there is continued"
    add("--name", metavar="RUN", help=name)
    add("--local", action="store_true", help="start on this machine, also where Slurm is")
    add("--dry-run", action="store_true", help="print the script and the code; write nothing")
    add("--wait", action="store_true", help="show the output until the end; exit as the run does")
    add("words", nargs="*", metavar="[recipe] [key=value ...]", help="as for python -m train")
    return parser


def _plan(options: argparse.Namespace, argv: Sequence[str]) -> Submission:
    words = [*options.words, *([word("run.name", options.name)] if options.name else [])]
    recipe, config = parse(words)
    run = _run_directory(config.run.root, config.run.name, recipe)
    recipes = [Path(source) for source in options.words if _is_recipe_file(source)]
    job = Job(
        name=run.name,
        nodes=options.nodes,
        command=_command(options, run, Path(config.data.root)),
        directory=str(run.code),
        output=f"{str(run.job).replace('%', '%%')}/slurm-%j.out",
        cpus_per_task=options.cpus_per_task
        or options.nproc_per_node
        or options.gpus_per_node
        or RANKS_WITHOUT_GPU,
        gpus_per_node=options.gpus_per_node,
        mem=options.mem,
        time=options.time,
        partition=options.partition,
        account=options.account,
        qos=options.qos,
    )
    if options.time and options.time.count(":") == 1 and "-" not in options.time:
        minutes, _, rest = options.time.partition(":")
        note(f"--time {options.time} is {int(minutes)} minutes and {int(rest)} seconds")
    code = None if run.code.exists() else snapshot.plan(ROOT, run.path.parent)
    return Submission(tuple(argv), run, tuple(recipes), code, job, render(job), wait=options.wait)


def _run_directory(root: str, name: str | None, recipe: str) -> RunDir:
    if name is not None:
        return RunDir(root, name)
    stem = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    run, number = RunDir(root, stem), 2
    while run.path.exists():
        run, number = RunDir(root, f"{stem}-{number}"), number + 1
    return run


def _command(options: argparse.Namespace, run: RunDir, data_root: Path) -> tuple[str, ...]:
    """What every node runs, in the directory of the run's code."""
    words = [
        str(run.job / Path(source).name) if _is_recipe_file(source) else source
        for source in options.words
    ]
    if not data_root.is_absolute():  # relative to here, and the job runs elsewhere
        words.append(word("data.root", str(data_root.absolute())))
    command = [sys.executable, "-m", "launch", "supervise", "--run-dir", str(run.path)]
    if options.nproc_per_node:
        command += ["--nproc-per-node", str(options.nproc_per_node)]
    return (*command, "--", "-m", "train", *words)


def _is_recipe_file(source: str) -> bool:
    return "=" not in source and (source.endswith((".yaml", ".yml")) or "/" in source)


def _show(submission: Submission, local: bool) -> None:
    job = submission.job
    if local:
        print(f"cd {shlex.quote(job.directory)}\n{shlex.join(job.command)}\n")
        print(f"# on this machine, {job.nodes} times: once per simulated node")
    else:
        print(submission.script)
    code = submission.code.describe() if submission.code else "the run has its code already"
    print(f"# run directory: {submission.run.path}\n# code: {code}")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on is expected, not '{text}'")
    return int(text)


def _time(text: str) -> str:
    try:
        slurm.seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
