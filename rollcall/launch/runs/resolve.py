"""Which run does a process of a job work for, and what was asked for?

`submit` names the run directory on the command lines of `batch` and `supervise`, and its record
there says the rest. In a job script of a person's own, the words of its step must do.
"""

import re
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path

from rollcall.cli.installation import is_training, training_words
from rollcall.launch import frameworks
from rollcall.launch.scheduler.job import RANKS_WITHOUT_GPU
from rollcall.records.code import CodeRecord
from rollcall.records.job import Cell, JobRecord
from rollcall.records.run_dir import RunDir, plain


class CommandError(ValueError):
    """A command line that starts no run; the message says what is missing."""


@dataclass(frozen=True)
class Work:
    """The work of a supervisor."""

    run: RunDir
    program: tuple[str, ...]  # the command of every rank, word by word
    is_training: bool  # whether that is rollcall's own training, not a user's program
    is_submitted: bool = False  # whether `submit` started the run
    directory: Path | None = None  # of the run or array; None if the command line names none


@dataclass(frozen=True)
class StepFacts:
    """The facts about its step that a job's first process needs."""

    run: RunDir
    is_named: bool  # whether the command line names the run directory
    nodes: int | None  # how many hosts the step needs; None for all that the job has
    span: tuple[int, int] | None  # the fewest and the most hosts of an elastic job
    command: tuple[str, ...]  # what srun starts: the last words of the step
    continues: bool = True  # whether it is known that a restarted program continues its work


def add_run_options(parser: ArgumentParser) -> None:
    """Add the options that name a run to a process of its job."""
    parser.add_argument("--run-dir", type=Path, help="default: runs/<recipe or script>-<job id>")
    parser.add_argument("--cells", type=Path, help="what the tasks of a sweep's array run")


def parser() -> ArgumentParser:
    """Return the parser of `rollcall supervise`."""
    result = ArgumentParser(prog="rollcall supervise", allow_abbrev=False)
    add_run_options(result)
    ranks = f"ranks on every node (default: one per GPU, or {RANKS_WITHOUT_GPU} without a GPU)"
    restarts = "how often failed ranks restart (default: while they make progress; 0 for a script)"
    add = result.add_argument
    add("--nproc-per-node", help=f"{ranks}; 4,8,8 for different nodes")
    add("--start-method", choices=("fork", "torchrun"), default="fork")
    framework = "what the program computes with (default: by its imports)"
    add("--framework", choices=list(frameworks.TABLE), help=framework)
    add("--roles", help="role of each rank, in order: chief,ps:2,worker:3,evaluator")
    add("--max-restarts", type=int, metavar="N", help=restarts)
    modules = "a directory that the ranks search first for modules; may be repeated"
    add("--modules", action="append", default=[], metavar="DIR", help=modules)
    add("program", nargs=REMAINDER, metavar="-- PROGRAM", help="-m train digits …")
    return result


def work_of_supervisor(options: Namespace, env: Mapping[str, str], job: str) -> Work:
    """Find the run and the program of a supervisor; raise CommandError or ConfigError for none."""
    program = program_of(options)
    if options.run_dir is None:
        return Work(_default_run(program, job), program, is_training(program))
    record = JobRecord.read(options.run_dir)
    run, words = named_run(options, env)
    trains = is_training(program) if record is None else record.is_training
    return Work(run, (*program, *words), trains, record is not None, options.run_dir)


def program_of(options: Namespace) -> tuple[str, ...]:
    """Return the words of the program; raise CommandError if they name none."""
    program = tuple(options.program[options.program[:1] == ["--"] :])
    names = program[program[:1] == ("-m",) :]
    if not names or names[0].startswith("-"):
        raise CommandError("no program: add -- -m train, or -- script.py")
    return program


def check_code(directory: Path) -> None:
    """Say what has changed in the copies of a run's code; raise CommandError for a missing file."""
    job = directory / "job"
    copies = [(directory / "code", job / "source.json"), (job / "rollcall", job / "rollcall.json")]
    copies += [(path.with_name(path.stem), path) for path in (job / "modules").glob("*.json")]
    for copy, source in copies:
        record = CodeRecord.read(source) if copy.is_dir() else None
        for file, is_missing in record.damage(copy) if record else ():
            if is_missing:
                advice = "restore it, or submit the run again with --resume --new-code"
                raise CommandError(f"{copy / file} is missing, though it was submitted; {advice}")
            print(f"note: {copy / file} has changed since it was submitted", file=sys.stderr)


def facts_of_batch(options: Namespace, env: Mapping[str, str], job: str) -> StepFacts:
    """Find what a job's first process must know; raise like `work_of_supervisor`."""
    record = None if options.run_dir is None else JobRecord.read(options.run_dir)
    if record is None:
        return _facts_of_template(options.command, options.nodes, env, job)
    run, _ = named_run(options, env)
    recorded = record.more.get("command") or options.command[1 + len(_of_srun(options.command)) :]
    command = tuple(options.command[-len(recorded) :])
    if record.min_nodes is None:
        return StepFacts(run, True, record.nodes, None, command, record.continues)
    return StepFacts(run, True, None, (record.min_nodes, record.nodes), command, record.continues)


def _facts_of_template(
    step: Sequence[str], span: tuple[int, int] | None, env: Mapping[str, str], job: str
) -> StepFacts:
    """Find the same for a hand-written job script, from the words of its step and `--nodes`."""
    of_srun = _of_srun(step)
    asked = (re.fullmatch(r"--nodes=(\d+)", word) for word in of_srun)
    nodes = next((int(match[1]) for match in asked if match), None)
    command = tuple(step[1 + len(of_srun) :])
    for at, pair in enumerate(pairwise(step)):
        if pair in (("rollcall", "supervise"), ("launch", "supervise")):
            supervisor = parser().parse_args(step[at + 2 :])
            work = work_of_supervisor(supervisor, env, job)
            # With --max-restarts, the user says that a restart of the script makes progress.
            continues = work.is_training or bool(supervisor.max_restarts)
            is_named = supervisor.run_dir is not None
            return StepFacts(work.run, is_named, nodes, span, command, continues)
    for at in range(len(step)):
        if is_training(step[at:]):
            # Like run_dir.default_name: the plain number, also for a task of an array.
            run = _default_run(step[at:], env["SLURM_JOB_ID"])
            return StepFacts(run, False, nodes, span, command)
    raise CommandError("the step starts neither rollcall supervise nor python -m train")


def _of_srun(step: Sequence[str]) -> list[str]:
    return list(takewhile(lambda word: word.startswith("-"), step[1:]))


def finished(run: RunDir) -> str:
    """Return what a later job of a chain says of a finished run; empty if there is work left."""
    verdict = run.read_verdict()
    if verdict is None or verdict.state != "done":
        return ""
    return f"run {run.name} is finished: {verdict.reason}"


def named_run(options: Namespace, env: Mapping[str, str]) -> tuple[RunDir, tuple[str, ...]]:
    """Return the run that the options name, and its further words; CommandError without a cell."""
    given: Path = options.run_dir.absolute()
    if "SLURM_ARRAY_TASK_ID" not in env:
        return RunDir(given.parent, given.name), ()
    index = int(env["SLURM_ARRAY_TASK_ID"])  # each task has a run in the array's directory
    if options.cells is None:
        return RunDir(given, f"task-{index}"), ()
    cell = Cell.read(options.cells, index)
    if cell is None:
        raise CommandError(f"{options.cells} has no readable cell {index}: submit the sweep again")
    return RunDir(given, cell.name), tuple(cell.words)


def _default_run(program: Sequence[str], job: str) -> RunDir:
    words = training_words(program)
    if words is not None:
        from rollcall.config import parse  # here, because it costs 100 ms

        recipe, config = parse(words)
        return RunDir(config.run.root, config.run.name or f"{plain(recipe)}-{job}")
    name = program[1] if program[0] == "-m" else Path(program[0]).stem
    return RunDir("runs", f"{plain(name)}-{job}")
