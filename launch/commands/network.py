"""`rollcall network --nodes N`: measure the network between the nodes of a job.

Takes the options of `rollcall submit`; after `--`, the measurement takes --sizes and --json.
"""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from rollcall.installation import IS_CHECKOUT, ROOT
from rollcall.launch.submission import command

USAGE = "usage: rollcall network [options of rollcall submit] [-- [--sizes 64K,16M] [--json]]"


def main(argv: Sequence[str]) -> int:
    """Submit the measurement and wait for it; return its exit code."""
    if {"-h", "--help"} & {*argv}:
        print(f"{USAGE}\n\n{__doc__}")
        return 0
    given, rest = divided(argv)
    return submit(given, "rollcall.train.network", *rest)


def divided(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of `submit`, with a --root, and the words after `--`."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    given, rest = words[:end], words[end + 1 :]
    return [*given, f"--root={Path.cwd() / (values(given, 'root') or ['runs'])[-1]}"], rest


def values(given: Sequence[str], name: str) -> list[str]:
    """Return the values of an option, each as `--name=value` or as two words."""
    found = [it.partition("=")[2] for it in given if it.startswith(f"--{name}=")]
    return found + [after for word, after in pairwise(given) if word == f"--{name}"]


def submit(given: Sequence[str], module: str, *words: str) -> int:
    """Run a module of rollcall on all ranks of a job, and wait; return its exit code."""
    if IS_CHECKOUT:  # the module is found only there
        os.chdir(ROOT)
    return command.main(["--wait", *given, "--", "-m", module, *words])
