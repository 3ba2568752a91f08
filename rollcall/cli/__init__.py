"""`rollcall COMMAND …`: one table of commands for training and launching."""

import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import rollcall.requirements as requirements  # first: it checks the packages
from rollcall.commands import COMMANDS, LAUNCH
from rollcall.process import leave, output_is_closed
from rollcall.refusal import REFUSED, RefusedError, sentences
from rollcall.text import did_you_mean, table

PLAIN = {*LAUNCH, "explain", "checkpoint", "completion"} - {"batch", "supervise"}
"""Commands that run no code of the user's: an OSError becomes one sentence."""
WITH_A_PROGRAM = ("attach", "array", "batch", "remote", "supervise")
"""Commands whose last words are another program's."""


def main(argv: Sequence[str]) -> int:
    """Run the command that the first word names; return its exit code."""
    words = list(argv)
    if words and words[0] in LAUNCH and any(map(re.compile("--host(=|$)").match, _own(words))):
        words.insert(0, "remote")
    if words and words[0] in COMMANDS:
        if wrong := _without_value(words):
            print(f"{words[0]}: error: {wrong}: expected a value, not '--'", file=sys.stderr)
            return 2
        if words[0] not in LAUNCH:
            _find_modules_beside_current_directory()
        try:
            return int(importlib.import_module(COMMANDS[words[0]].module).main(words[1:]))
        except RefusedError as error:
            print(sentences(error), file=sys.stderr)
            return REFUSED
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except BrokenPipeError:  # `| head` has read enough
            if not output_is_closed():
                raise
            return 128 + signal.SIGPIPE
        except OSError as error:
            if words[0] not in PLAIN:  # the code of a user's model or data may raise it
                raise
            what = f"{error.filename}: {error.strerror}" if error.filename else error
            print(f"{words[0]}: error: {what}", file=sys.stderr)
            return 2
    if words and words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words:
        hint = did_you_mean(words[0], COMMANDS)
        print(f"rollcall: error: unknown command '{words[0]}'{hint}", file=sys.stderr)
    print(usage(), file=sys.stderr)
    return 2


def _without_value(words: Sequence[str]) -> str | None:
    """Return an option such as `--root=--`, for which argparse of Python 3.11 raises ValueError."""
    if words[0] in WITH_A_PROGRAM:
        return None
    return next((word for word in _own(words) if re.fullmatch(r"--[a-z-]+=--", word)), None)


def _own(words: Sequence[str]) -> Sequence[str]:
    """Return the words before the user's program."""
    return words[: words.index("--")] if "--" in words else words


def usage() -> str:
    """Return the help text: one line for each command that people type."""
    rows = [(name, command.meaning) for name, command in COMMANDS.items() if command.by_people]
    lines = [f"  {line}" for line in table(rows)]
    more = "`rollcall COMMAND --help` shows the options of a command."
    return "\n".join(["Usage: rollcall COMMAND [--help] ...", "", *lines, "", more])


def run(*words: str) -> NoReturn:
    """Run as the program `rollcall`, with these words before the command line."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # closed, as by `>&-`: the next file opened would take its place
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r"))  # noqa: PTH123, SIM115
        elif number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files are not always text
    with requirements.explain_missing_packages():
        try:
            code = main([*words, *sys.argv[1:]])
        except SystemExit as end:  # of argparse; the interpreter's own end would need the output
            if end.code is not None and not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        leave(code)


def _find_modules_beside_current_directory() -> None:
    """Let `model.name=my_module:Net` find `./my_module.py`, as `python -m rollcall.train` does."""
    here = str(Path.cwd())
    if not sys.flags.safe_path and here not in sys.path:
        sys.path.insert(0, here)
