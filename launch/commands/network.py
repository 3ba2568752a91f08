"""`rollcall network --nodes N`: measure the network between the nodes of a job.

Takes the options of `rollcall submit`; after `--`, the measurement takes --sizes and --json.
"""

import os
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
    job = OwnJob(argv, "rollcall.train.network")
    return job.submit(*job.words)


class OwnJob:
    """A module of rollcall that runs on all ranks of a job; words after `--` are for the module.

    `defaults` are options of `submit` that those in `argv` replace.
    """

    def __init__(self, argv: Sequence[str], module: str, *defaults: str) -> None:
        end = argv.index("--") if "--" in argv else len(argv)
        self._given, self.words = ["--wait", *defaults, *argv[:end]], argv[end + 1 :]
        self._line, self._setup = layers.read([*self._given, "--", "-m", module])
        self.options = self._line.own
        self.options.root = str(Path.cwd() / (self.options.root or "runs"))
        for name in ("python", "container"):
            path = getattr(self.options, name)
            if path and Path(path).exists():
                setattr(self.options, name, str(Path(path).absolute()))

    def submit(self, *words: str) -> int:
        """Submit the job and wait for it; return its exit code."""
        line = self._line._replace(program=(*self._line.program, *words))
        argv = [*self._given, f"--root={self.options.root}", "--", *line.program]
        if IS_CHECKOUT:  # the module is found only there
            os.chdir(ROOT)
        return command.submit(line, argv, self._setup)
