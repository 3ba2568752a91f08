"""Rules about the script's text and its #SBATCH lines.

A rule reports what it is sure of: it keeps silent about values that only the job will know.
"""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from launch.lint.options import FLAGS, WITH_VALUE
from launch.lint.script import Finding, Script
from launch.slurm import TIME_FORMATS, seconds

OPTIONS = FLAGS | WITH_VALUE


def syntax_error(script: Script) -> Iterator[Finding]:
    """A quote without its partner, or what else bash cannot read."""
    cure = "look there and above for a quote or bracket that is opened and not closed"
    if script.is_shell and shutil.which("bash"):
        command = ["bash", "-n", "--", str(script.path)]
        check = subprocess.run(command, capture_output=True, text=True, check=False)
        if message := re.search(r": line (\d+): (.*)", check.stderr):
            yield Finding(int(message[1]), f"bash cannot read this: {message[2]}", cure)
    elif script.unbalanced:
        yield Finding(script.unbalanced.line, "this quote or bracket has no partner", cure)


def commented_directive(script: Script) -> Iterator[Finding]:
    """`# SBATCH`, which is a comment."""
    for line in script.disabled:
        reason = "this is a comment for sbatch: a directive begins with #SBATCH at the line's start"
        yield Finding(line, reason, "write #SBATCH, or ##SBATCH for one that is switched off")


def late_directive(script: Script) -> Iterator[Finding]:
    """A directive below the first command."""
    for line in script.late:
        reason = (
            "sbatch stops reading directives at the first command, which stands above this line"
        )
        yield Finding(line, reason, "move it above the first command")


def unknown_option(script: Script) -> Iterator[Finding]:
    """An option that sbatch does not have."""
    for directive in script.directives:
        name = directive.option
        complete = [known for known in OPTIONS if known.startswith(name)]
        if name in OPTIONS or len(complete) == 1:
            continue
        nearest = difflib.get_close_matches(name, sorted(OPTIONS), 1, 0.6)
        option = name if name.startswith("-") else f"--{name}"
        yield Finding(
            directive.line,
            f"sbatch has no option {option}, and refuses the script",
            f"write --{nearest[0]}" if nearest else "see sbatch --help, also for your site's own",
        )


def short_time(script: Script) -> Iterator[Finding]:
    """A time limit like `02:00`, which is two minutes."""
    for directive in script.directives:
        if directive.option not in ("time", "time-min"):
            continue
        text = directive.value
        try:
            seconds(text)
        except ValueError:
            reason = f"'{text}' is no time that Slurm reads"
            yield Finding(directive.line, reason, f"the forms are {TIME_FORMATS}")
            continue
        # Above 24 nobody meant hours: 30:00 is half an hour.
        if (match := re.fullmatch(r"(\d+):00", text)) and int(match[1]) <= 24:
            minutes = int(match[1])
            reason = f"{text} is minutes and seconds: {minutes} minutes"
            cure = f"write {minutes}:00:00 for hours, or {minutes} for minutes"
            yield Finding(directive.line, reason, cure)


def output_directory(script: Script) -> Iterator[Finding]:
    """A directory of the job's output that will not be there."""
    for option in ("output", "error"):
        directive = script.option(option)
        if directive is None:
            continue
        folder, slash, _ = directive.value.rpartition("/")
        if not slash or not folder or folder == "/dev":
            continue
        if re.search(r"[$~]", folder):
            reason = f"sbatch fills in no variable and no ~: '{folder}' is taken as it stands"
            cure = "write the path out, or give --output on the command line"
        elif "%" in folder:
            reason = f"'{folder}' is new with every job, and Slurm makes no directory before 23.02"
            cure = "put the % patterns into the file's name, in a directory that is there"
        elif _is_missing(folder, script.value("chdir")):
            reason = f"there is no directory '{folder}': the job would fail without any output"
            cure = f"mkdir -p {folder} before you submit; in the script it is too late"
        else:
            continue
        yield Finding(directive.line, reason, cure)


def _is_missing(folder: str, place: str) -> bool:
    path = Path(place or ".") / folder
    # Of a file system that is not here, such as a cluster's on a laptop, nothing can be said.
    known = not path.is_absolute() or any(
        parent.is_dir() for parent in path.parents if len(parent.parts) == 2
    )
    return known and not path.is_dir()


def requeue_truncates(script: Script) -> Iterator[Finding]:
    """A job that is requeued and overwrites its output."""
    requeue = script.option("requeue")
    line = requeue.line if requeue else 0
    for launch in script.launches():
        if launch.program[:2] == ("scontrol", "requeue"):
            line = line or launch.line
    if line and not script.value("open-mode").startswith("a"):
        reason = "each time the job is requeued it overwrites the output of the time before"
        yield Finding(line, reason, "add #SBATCH --open-mode=append")
