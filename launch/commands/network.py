"""`rollcall network --nodes N`: measure the network between the nodes of a job.

Takes the options of `rollcall submit`; after `--`, the measurement takes --sizes and --json.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from rollcall.installation import IS_CHECKOUT, ROOT
from rollcall.launch.submission import command, layers
from rollcall.run_dir import RunDir

USAGE = "usage: rollcall network [options of rollcall submit] [-- [--sizes 64K,16M] [--json]]"
RUNS = "runs"
"""The directory of runs that `submit` takes if no option names one."""


def main(argv: Sequence[str]) -> int:
    """Submit the measurement and wait for it; return its exit code."""
    if {"-h", "--help"} & {*argv}:
        print(f"{USAGE}\n\n{__doc__}")
        return 0
    given, rest = divided(argv)
    return submit(given, "rollcall.train.network", *rest)


def divided(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of `submit`, and the words after `--`."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def run_of(given: Sequence[str], name: str) -> RunDir:
    """Return the directory of the run that these options name, or `name` if they do not.

    Raises:
        RefusedError: an option is wrong.
    """
    own = layers.read(given)[0].own
    return RunDir(Path(own.root or RUNS).absolute(), own.name or name)


def submit(given: Sequence[str], module: str, *words: str) -> int:
    """Run a module of rollcall on all ranks of a job, and wait; return its exit code."""
    argv = ["--wait", *given, "--", "-m", module, *words]
    line, setup = layers.read(argv)
    line.own.root = str(Path(line.own.root or RUNS).absolute())
    if IS_CHECKOUT:  # the module is found only there; paths of the options are of this directory
        os.chdir(ROOT)
    return command.begin(line, setup, argv)
