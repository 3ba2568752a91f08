"""`python -m launch.guest DIRECTORY script.py …`: a rank that runs a program of the user's own.

The supervisor and the agent work in rollcall's own copy, so that a user's `train.py` or `launch/`
never stands in for rollcall's. Here a rank goes over to the user's directory and forgets rollcall's
modules: the program finds what it would find under torchrun.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

OURS = ("env", "launch", "train")


def main(argv: Sequence[str]) -> None:
    """Run the program in its directory as `__main__`; its exceptions are the caller's."""
    directory, *program = argv
    os.chdir(directory)
    for name in list(sys.modules):
        if name.partition(".")[0] in OURS:
            del sys.modules[name]
    is_module = program[0] == "-m"
    sys.argv = program[is_module:]
    # What the interpreter would put there; it was rollcall's copy.
    sys.path[0] = directory if is_module else str(Path(program[0]).resolve().parent)
    if is_module:
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
