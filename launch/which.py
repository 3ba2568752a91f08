"""Which run does a supervisor work for? The given one, or the one that its words ask for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from launch.job import RANKS_WITHOUT_GPU
from train.run import RunDir


class CommandError(ValueError):
    """A command line that starts no run of ours; the message says what it lacks."""


def parser() -> argparse.ArgumentParser:
    """The command line of `python -m launch supervise`."""
    result = argparse.ArgumentParser(prog="python -m launch supervise", allow_abbrev=False)
    result.add_argument("--run-dir", type=Path, help="default: runs/<recipe or script>-<job id>")
    result.add_argument("--cells", type=Path, help="what the tasks of an array run, from a sweep")
    result.add_argument(
        "--nproc-per-node",
        type=int,
        help="ranks on every node (default: one per GPU, and "
        f"{RANKS_WITHOUT_GPU} where there is none)",
    )
    result.add_argument("--start-method", choices=("fork", "torchrun"), default="fork")
    result.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="how often failed ranks start again (default: as long as they get on; a script of "
        "your own: 0)",
    )
    result.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- PROGRAM", help="-m train digits …"
    )
    return result


def find(
    options: argparse.Namespace, env: Mapping[str, str], job: str
) -> tuple[RunDir, list[str], bool]:
    """The run that a supervisor's command line means.

    Args:
        options: of the supervisor.
        env: its environment, which tells the task of an array.
        job: the id of the job.

    Returns:
        The run, its program, and whether the command line names the run.

    Raises:
        CommandError: there is no program.
        ConfigError: the program's words are not what train takes.
    """
    program = list(options.program[options.program[:1] == ["--"] :])
    if not program:
        raise CommandError("no program: add -- -m train, or -- script.py")
    given: Path | None = options.run_dir
    if given is None:
        return _asked_for(program, job), program, False
    if "SLURM_ARRAY_TASK_ID" in env:
        given, words = _array_task(given, options.cells, int(env["SLURM_ARRAY_TASK_ID"]))
        program += words
    return RunDir(given.absolute().parent, given.name), program, True


def finished(run: RunDir) -> str:
    """What a later job of a chain says of a run that is done; nothing if there is work left."""
    verdict = run.read_verdict()
    if verdict is None or verdict.state != "done":
        return ""
    return f"run {run.name} is finished: {verdict.reason}"


def of_step(command: Sequence[str], env: Mapping[str, str], job: str) -> tuple[RunDir, bool]:
    """The run of a job whose step has this command line, with srun or without.

    Returns:
        The run, and whether the command line names it.

    Raises:
        CommandError: it starts neither a supervisor nor our training.
        ConfigError: the words are not what train takes.
    """
    pairs = list(pairwise(command))
    if ("launch", "supervise") in pairs:
        words = command[pairs.index(("launch", "supervise")) + 2 :]
        run, _, is_named = find(parser().parse_args(words), env, job)
        return run, is_named
    if ("-m", "train") in pairs:
        # As train.run.default_name has it: the number, also for a task of an array.
        words = command[pairs.index(("-m", "train")) :]
        return _asked_for(words, env["SLURM_JOB_ID"]), False
    raise CommandError("the step starts neither python -m launch supervise nor python -m train")


def _array_task(directory: Path, cells: Path | None, index: int) -> tuple[Path, list[str]]:
    """The run of one task of an array, and what its program is told besides.

    Args:
        directory: of the array, in which every task has a run of its own.
        cells: what the tasks run, if the array is a sweep.
        index: of the task.
    """
    if cells is None:
        return directory / f"task-{index}", []
    cell = json.loads(cells.read_text())[index]
    return directory / cell["name"], cell["words"]


def _asked_for(program: Sequence[str], job: str) -> RunDir:
    if list(program[:2]) == ["-m", "train"]:
        from train.config import parse  # here, because it costs 100 ms

        recipe, config = parse(program[2:])
        return RunDir(config.run.root, config.run.name or f"{recipe}-{job}")
    name = program[1] if program[0] == "-m" else Path(program[0]).stem
    return RunDir("runs", f"{name}-{job}")
