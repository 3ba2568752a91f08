"""`rollcall network --nodes N`: measure the network between the nodes of a job.

Takes the options of `rollcall submit`; after `--`, the measurement takes --sizes and --json.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from rollcall.cli.installation import IS_CHECKOUT, ROOT
from rollcall.launch.submission import command, layers
from rollcall.launch.submission.options import CommandLine
from rollcall.messages.refusal import RefusedError

USAGE = "usage: rollcall network [options of rollcall submit] [-- [--sizes 64K,16M] [--json]]"
Parsed = tuple[CommandLine, tuple[str, ...]]
"""The options of `submit`, and the setup of a profile."""


def main(argv: Sequence[str]) -> int:
    """Submit the measurement and wait for it; return its exit code."""
    if {"-h", "--help"} & {*argv}:
        print(f"{USAGE}\n\n{__doc__}")
        return 0
    given, rest = divided(argv)
    parsed = read("network", given, "--sizes", "--json", "--device")
    return submit(parsed, given, "rollcall.train.network", *rest)


def divided(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of `submit`, and the words after `--`."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def read(name: str, given: Sequence[str], *options: str) -> Parsed:
    """Parse the words before `--` for the command `name`; its own `options` belong after it."""
    usage = f"rollcall {name} [options of rollcall submit] -- [{'] ['.join(options)}]"
    for word in given:
        if word.partition("=")[0] in options:
            raise RefusedError(f"{word}: write it after `--`, as in {usage}")
    line, setup = layers.read(["--wait", *given])
    if line.own.words:
        raise RefusedError(f"{line.own.words[0]}: expected {usage}")
    line.own.root = str(Path(line.own.root or "runs").absolute())
    return line, setup


def submit(parsed: Parsed, given: Sequence[str], module: str, *words: str) -> int:
    """Run a module of rollcall on all ranks of a job, and wait; return its exit code."""
    line = parsed[0]._replace(program=("-m", module, *words))
    if IS_CHECKOUT:  # Python finds the module only there; --root is absolute already
        os.chdir(ROOT)
    return command.begin(line, parsed[1], ["--wait", *given, "--", *line.program])
