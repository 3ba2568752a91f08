"""`rollcall network --nodes N`: measure the network between the nodes of a job.

Takes the options of `rollcall submit`; after `--`, the measurement takes --sizes and --json.
"""

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from rollcall.installation import IS_CHECKOUT, ROOT
from rollcall.launch.submission import command, layers

USAGE = "usage: rollcall network [options of rollcall submit] [-- [--sizes 64K,16M] [--json]]"


def main(argv: Sequence[str]) -> int:
    """Submit the measurement and wait for it; return its exit code."""
    if {"-h", "--help"} & {*argv}:
        print(f"{USAGE}\n\n{__doc__}")
        return 0
    given, rest, _ = divided(argv)
    return submit(given, "rollcall.train.network", *rest)


def divided(argv: Sequence[str], *more: str) -> tuple[list[str], list[str], Namespace]:
    """Return the options of `submit`, with an absolute --root, and the words after `--`.

    Also return what `submit` reads of these options. `more` are options for the whole job.
    """
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    given, rest = words[:end], words[end + 1 :]
    place = given.index(":") if ":" in given else end  # before a second group of nodes
    own = layers.read([*given, "--", "program"])[0].own
    own.root = str(Path(own.root or "runs").absolute())
    return [*given[:place], f"--root={own.root}", *more, *given[place:]], rest, own


def submit(given: Sequence[str], module: str, *words: str) -> int:
    """Run a module of rollcall on all ranks of a job, and wait; return its exit code."""
    if IS_CHECKOUT:  # the module is found only there
        os.chdir(ROOT)
    return command.main(["--wait", *given, "--", "-m", module, *words])
