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
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    given, rest = words[:end], words[end + 1 :]
    if IS_CHECKOUT:  # the module is found only there
        here = Path.cwd()
        names = (word for word in given if word.startswith("--root="))
        roots = [word.partition("=")[2] for word in names]
        roots += [after for word, after in pairwise(given) if word == "--root"]
        given.append(f"--root={here / (roots or ['runs'])[-1]}")
        os.chdir(ROOT)
    return command.main(["--wait", *given, "--", "-m", "rollcall.train.network", *rest])
