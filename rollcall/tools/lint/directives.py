"""Rules about the script's text and its #SBATCH lines.

A rule reports only certain mistakes. It ignores values that are known only when the job runs.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from rollcall.launch.scheduler import cluster
from rollcall.launch.scheduler.sbatch_options import FLAGS, WITH_VALUE, did_you_mean
from rollcall.launch.scheduler.slurm import TIME_FORMATS, seconds
from rollcall.tools.lint.job import number
from rollcall.tools.lint.script import Finding, Rule, Script

OPTIONS = FLAGS | WITH_VALUE


def syntax_error(script: Script) -> Iterator[Finding]:
    """An unbalanced quote or another error that keeps bash from reading the script."""
    fix = "look there and above for a quote or bracket that is not closed"
    if script.is_shell and shutil.which("bash"):
        check = subprocess.run(["bash", "-n"], input=script.text, capture_output=True, text=True)
        if message := re.search(r": line (\d+): (.*)", check.stderr):
            yield Finding(int(message[1]), f"bash cannot read this: {message[2]}", fix)
    elif script.unbalanced:
        yield Finding(script.unbalanced.line, "this quote or bracket is not closed", fix)


def dos_line_ends(script: Script) -> Iterator[Finding]:
    """Line ends of Windows, for which sbatch refuses the script."""
    if script.has_dos_line_ends:
        yield Finding(1, "sbatch refuses scripts with DOS line breaks", "run dos2unix on this file")


def byte_order_mark(script: Script) -> Iterator[Finding]:
    """A byte order mark, which some editors of Windows write before `#!`."""
    if script.has_byte_order_mark:
        reason = "sbatch refuses scripts that begin with a byte order mark instead of #!"
        path = shlex.quote(str(script.path))
        yield Finding(1, reason, f"remove it: sed -i '1s/^\\xEF\\xBB\\xBF//' {path}")


def commented_directive(script: Script) -> Iterator[Finding]:
    """`# SBATCH`, which sbatch reads as a comment."""
    for line in script.disabled:
        reason = "sbatch reads this as a comment: directives start with #SBATCH in the first column"
        yield Finding(line, reason, "write #SBATCH, or ##SBATCH to disable the directive")


def late_directive(script: Script) -> Iterator[Finding]:
    """A directive below the first command."""
    for line in script.late:
        reason = "sbatch stops reading directives at the first command, which is above this line"
        yield Finding(line, reason, "move it above the first command")


def unknown_option(script: Script) -> Iterator[Finding]:
    """An option that is a typing error, not one of a plugin of the site."""
    for directive in script.directives:
        name = directive.option
        complete = [known for known in OPTIONS if known.startswith(name)]
        if name in OPTIONS or len(complete) == 1:
            continue
        hint, is_letter = did_you_mean(name), re.fullmatch("-.?", name) is not None
        if not is_letter and (not hint or name in cluster.options_of_site()):
            continue  # plugins have no options of one letter
        yield Finding(
            directive.line,
            f"sbatch has no option {name if is_letter else f'--{name}'}{hint}",
            "correct the name; `sbatch --help` lists the options, including your site's own",
        )


def short_time(script: Script) -> Iterator[Finding]:
    """A time limit such as `02:00` or `24`, which means minutes."""
    for directive in script.directives:
        if directive.option not in ("time", "time-min"):
            continue
        text = directive.value
        try:
            seconds(text)
        except ValueError:
            reason = f"'{text}' is not a valid Slurm time limit"
            yield Finding(directive.line, reason, f"use {TIME_FORMATS}")
            continue
        comment = script.lines[directive.line - 1].partition(" #")[2].lower()
        means_hours = re.search(r"\bh(ou)?rs?\b|\bdays?\b|\d+h\b", comment)
        # 10:00 and 30 may be meant; nobody means 02:00, or a whole number of days.
        is_typical = re.fullmatch(r"0\d:00|(12|24|48|72|96|168):00|24|48|72|96|168", text)
        if (
            is_typical or (means_hours and re.fullmatch(r"\d+(:00)?", text))
        ) and "min" not in comment:
            minutes = number(text.partition(":")[0])
            form = "the form is minutes:seconds" if ":" in text else "a number alone is minutes"
            fix = f"write {minutes}:00:00 for hours, or 0:{minutes}:00 for minutes"
            yield Finding(directive.line, f"{text} means {minutes} minutes: {form}", fix)


def small_memory(script: Script) -> Iterator[Finding]:
    """A memory such as `--mem=64`, which means megabytes."""
    for directive in script.directives:
        least = {"mem": 1025, "mem-per-gpu": 1025, "mem-per-cpu": 65}.get(directive.option, 0)
        if 0 < (number(directive.value) or 0) < least:
            reason = f"{directive.value} means {directive.value} MB: a number alone is megabytes"
            yield Finding(directive.line, reason, f"write --{directive.option}={directive.value}G")


def output_directory(script: Script) -> Iterator[Finding]:
    """A directory for the job's output that does not exist."""
    for option in ("output", "error"):
        directive = script.option(option)
        if directive is None:
            continue
        folder, slash, _ = directive.value.rpartition("/")
        if not slash or not folder or folder == "/dev":
            continue
        if re.search(r"[$~]", folder):
            reason = f"sbatch expands neither variables nor ~: '{folder}' is used literally"
            fix = "write the full path, or give --output on the command line"
        elif "%" in folder and (cluster.version() or (0, 0)) >= (23, 2):
            continue
        elif "%" in folder:
            reason = f"'{folder}' differs for every job, and Slurm before 23.02 does not create it"
            fix = "use the % patterns only in the file name, in an existing directory"
        elif _is_missing(folder, script):
            reason = f"the directory '{folder}' does not exist: the job would fail without output"
            fix = f"run mkdir -p {folder} before you submit; in the script it is too late"
        else:
            continue
        yield Finding(directive.line, reason, fix)


def _is_missing(folder: str, script: Script) -> bool:
    """Return True if a directory is missing here and wherever one may submit from."""
    chdir, path = script.value("chdir"), Path(folder)
    folders = [Path(chdir)] if chdir else [Path(), *script.path.resolve().parents]
    if not path.is_absolute():
        return not any((start / path).is_dir() for start in folders)
    # The file system may exist only on the cluster and not on this machine.
    known = any(parent.is_dir() for parent in path.parents if len(parent.parts) == 2)
    return known and not path.is_dir()


def requeue_truncates(script: Script) -> Iterator[Finding]:
    """A requeued job that overwrites its output."""
    requeue = script.option("requeue")
    line = requeue.line if requeue else 0
    for launch in script.launches:
        if launch.program[:2] == ("scontrol", "requeue"):
            line = line or launch.line
    if line and not script.value("open-mode").startswith("a"):
        reason = "each time the job is requeued, it overwrites its earlier output"
        yield Finding(line, reason, "add #SBATCH --open-mode=append")


RULES: tuple[Rule, ...] = (
    *(syntax_error, dos_line_ends, byte_order_mark, commented_directive, late_directive),
    *(unknown_option, short_time, small_memory, output_directory, requeue_truncates),
)
