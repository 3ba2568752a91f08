"""What does a submission ask for? Command line to job, checked before anything is written.

This is all that a dry run needs, so nothing here imports submitit, psutil or torch.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launch import options, place, slurm, snapshot
from launch.job import RANKS_WITHOUT_GPU, Job, JobError, render
from launch.options import CommandLine, OptionError
from launch.slurm import SlurmError
from launch.snapshot import Snapshot, SnapshotError
from launch.words import word
from train.commands import COMMANDS
from train.config import Config, ConfigError, parse
from train.run import RunDir

if TYPE_CHECKING:
    from launch.program import Guest

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ("-m", "train")
OTHERS = [(name,) for name in COMMANDS]
"""What stands behind `TRAIN` where nothing is trained: such a command runs as a user's program."""


class RefusedError(Exception):
    """The request cannot be met; nothing has been written."""


class TakenError(RefusedError):
    """Another submission has made the run's directory since the plan."""


MISTAKES = (RefusedError, ConfigError, OptionError, JobError, SlurmError, SnapshotError)
"""What is told to the user in a sentence."""


@dataclass(frozen=True, eq=False, repr=False)
class Submission:
    """Everything that starting a run needs.

    Attributes:
        argv: the command line, word by word.
        recipes: recipe files of the user's own, which the run gets a copy of.
        code: what to copy as the run's code; None if the run has its code already.
        launcher: what to copy as rollcall itself, where the code is the user's own.
        is_new: whether the run directory is to be made.
        later: further jobs of the run, each after the one before.
        files: what else belongs into job/, by name.
        resume: whether a run that has failed or is finished goes on.
        wait: whether to follow the run to its end.
    """

    argv: tuple[str, ...]
    run: RunDir
    recipes: tuple[Path, ...]
    code: Snapshot | None
    launcher: Snapshot | None
    job: Job
    is_new: bool = False
    later: tuple[Job, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    resume: bool = False
    wait: bool = False


def main(argv: Sequence[str]) -> int:
    """Do what the command line asks; return the exit code."""
    try:
        line, setup = read(argv)
        if line.own.discover:
            from launch import discover  # here, because few command lines need it

            return discover.main(line.own.cluster)
        local = line.own.local or not slurm.is_available()
        if line.own.dry_run:
            show(plan(line, argv, setup), local)
            return 0
        if local and not line.own.local:
            note("there is no sbatch here: the run starts on this machine")
        from launch import start  # here, because it imports submitit

        while True:
            with contextlib.suppress(TakenError):
                return start.start(plan(line, argv, setup), local)
    except MISTAKES as error:
        for text in str(error).splitlines():
            print(f"submit: error: {text}", file=sys.stderr)
        return 2


def read(argv: Sequence[str]) -> tuple[CommandLine, tuple[str, ...]]:
    """Take a command line apart, with the cluster's profile before it if it names one.

    Returns:
        The command line, and shell lines for the job script.

    Raises:
        OptionError: something in it, or in the profile, cannot be read.
    """
    line = options.read(argv)
    if not line.own.cluster or line.own.discover:
        return line, ()
    from launch import profile  # here, because few command lines need it

    words, setup = profile.load(line.own.cluster)
    return options.read([*words, *argv]), setup


def note(text: str) -> None:
    """Tell the user what may surprise."""
    print(f"submit: note: {text}", file=sys.stderr)


def plan(line: CommandLine, argv: Sequence[str], setup: tuple[str, ...]) -> Submission:
    """The submission that a command line asks for; nothing is written.

    Raises:
        Exception: one of MISTAKES.
    """
    own = line.own
    is_training = line.program[:2] == TRAIN and line.program[2:3] not in OTHERS
    words = list(line.program[2:] if is_training else own.words)
    guest = None
    if line.program and not is_training:
        from launch import program  # here, because few command lines need it

        guest = program.guest(line.program)
    named = [
        *([word("run.name", own.name)] if own.name else []),
        *([word("run.root", own.root)] if own.root else []),
    ]
    recipe, config = parse([*words, *named])
    if (problem := place.problem(Path(config.run.root).absolute())) is not None:
        raise RefusedError(f"run.root: {problem}")
    run = _run_directory(config, guest.name if guest else recipe)
    is_new = config.run.name is None or not run.path.exists()
    command = guest.command(run.code) if guest else _training(words, run, config)
    job_id = "%A_%a" if "array" in line.passed else "%j"
    least, most = own.nodes
    ranks = own.nproc_per_node or own.gpus_per_node or RANKS_WITHOUT_GPU
    if guest is None and least < most:
        _check_every_size(config, range(least, most + 1), ranks)
    job = Job(
        name=run.name,
        nodes=most,
        min_nodes=least if least < most else None,
        spares=own.spares,
        command=(*_supervisor(own, run), "--", *command),
        directory=str(launcher_copy(run) if guest else run.code),
        output=f"{str(run.job).replace('%', '%%')}/slurm-{job_id}.out",
        cpus_per_task=own.cpus_per_task or ranks,
        gpus_per_node=own.gpus_per_node,
        mem=own.mem,
        time=own.time,
        partition=own.partition,
        options=line.passed,
        srun=tuple(own.srun_arg),
        setup=setup,
        batch=(sys.executable, "-m", "launch", "batch"),
    )
    if own.time and own.time.count(":") == 1 and "-" not in own.time:
        minutes, _, rest = own.time.partition(":")
        note(f"--time {own.time} is {int(minutes)} minutes and {int(rest)} seconds")
    code = launcher = None
    if own.new_code or not run.code.exists():
        code = _code(guest, run)
        launcher = snapshot.plan(ROOT, run.path.parent, snapshot.PACKAGED) if guest else None
    recipes = tuple(Path(source) for source in words if _is_recipe_file(source))
    return Submission(
        tuple(argv),
        run,
        recipes,
        code,
        launcher,
        job,
        is_new=is_new,
        later=(job,) * (own.chain - 1),
        resume=own.resume,
        wait=own.wait,
    )


def _check_every_size(config: Config, sizes: range, ranks: int) -> None:
    """See that a run can train on each of these numbers of nodes.

    Raises:
        RefusedError: it cannot on one of them.
    """
    for nodes in sizes:
        try:
            config.parallel.degrees(nodes * ranks, ranks)
        except ConfigError as error:
            span = f"--nodes {sizes[0]}-{sizes[-1]}, with {nodes} of them"
            raise RefusedError(f"{span}: {error}") from None


def launcher_copy(run: RunDir) -> Path:
    """Where a run of the user's own code keeps the rollcall that starts it."""
    return run.job / "rollcall"


def _code(guest: Guest | None, run: RunDir) -> Snapshot:
    """What to copy as the run's code.

    Raises:
        RefusedError, SnapshotError: it would lack the script, or it cannot be listed.
    """
    if guest is None:
        return snapshot.plan(ROOT, run.path.parent, snapshot.PACKAGED)
    code = snapshot.plan(guest.checkout, run.path.parent)
    script = (guest.directory / guest.words[0]).resolve()
    if guest.words[0] != "-m" and not any(script == guest.checkout / name for name in code.files):
        raise RefusedError(f"{guest.words[0]}: git ignores it, so no copy would have it")
    return code


def _run_directory(config: Config, stem: str) -> RunDir:
    root, name = config.run.root, config.run.name
    if name is not None:
        return RunDir(root, name)
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", stem).lstrip("._-")
    stem = f"{stem or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    run, number = RunDir(root, stem), 2
    while run.path.exists():
        run, number = RunDir(root, f"{stem}-{number}"), number + 1
    return run


def _supervisor(own: Namespace, run: RunDir) -> list[str]:
    """What every node runs, up to the program."""
    command = [sys.executable, "-m", "launch", "supervise", "--run-dir", str(run.path)]
    if own.nproc_per_node:
        command += ["--nproc-per-node", str(own.nproc_per_node)]
    if own.start_method:
        command += ["--start-method", own.start_method]
    if own.max_restarts is not None:
        command += ["--max-restarts", str(own.max_restarts)]
    return command


def _training(words: Sequence[str], run: RunDir, config: Config) -> tuple[str, ...]:
    """The built-in training, as it is called in the directory of the run's code."""
    copied = [
        str(run.job / Path(source).name) if _is_recipe_file(source) else source for source in words
    ]
    root = Path(config.data.root)
    if not root.is_absolute():  # relative to here, and the job runs elsewhere
        copied.append(word("data.root", str(root.absolute())))
    return (*TRAIN, *copied)


def _is_recipe_file(source: str) -> bool:
    return "=" not in source and (source.endswith((".yaml", ".yml")) or "/" in source)


def show(submission: Submission, local: bool) -> None:
    """Print what would be done."""
    job = submission.job
    if local:
        print(f"cd {shlex.quote(job.directory)}\n{shlex.join(job.command)}\n")
        print(f"# on this machine, {job.nodes} times: once per simulated node")
    else:
        print(render(job))
    code = submission.code.describe() if submission.code else "the run has its code already"
    print(f"# run directory: {submission.run.path}\n# code: {code}")
