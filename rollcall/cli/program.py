"""`rollcall COMMAND …`: one table of commands for training and launching."""

import errno
import gc
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import rollcall.messages.requirements as requirements  # first: it checks the packages
from rollcall.cli.commands import COMMANDS, LAUNCH
from rollcall.cli.installation import ROOT, version
from rollcall.messages.refusal import REFUSED, RefusedError, sentences
from rollcall.messages.text import did_you_mean, table
from rollcall.system.process import Printable, leave, output_is_closed

PLAIN = {*LAUNCH, "explain", "checkpoint"} - {"batch", "supervise"}
"""Commands that run no code of the user's: an OSError becomes one sentence."""


def main(argv: Sequence[str]) -> int:
    """Run the command that the first word names; return its exit code."""
    words = list(argv)
    given = takewhile("--".__ne__, words)  # the words before the user's program
    if words and words[0] in LAUNCH and any(map(re.compile("--host(=|$)").match, given)):
        words.insert(0, "remote")
    try:
        if not words or words[0] not in COMMANDS:
            return _without_command(words)
        if words[0] not in LAUNCH and not sys.flags.safe_path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # for `my_module:Net`, as `python -m` does
        return int(_imported(f"rollcall.{COMMANDS[words[0]].module}").main(words[1:]))
    except RefusedError as error:
        print(sentences(error), file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print(f"rollcall {words[0]}: stopped by Ctrl-C", file=sys.stderr)
        return (
            os.EX_TEMPFAIL if words[0] in ("train", "predict", "generate") else 128 + signal.SIGINT
        )
    except OSError as error:
        ends = {errno.EPIPE: signal.SIGPIPE, errno.EIO: signal.SIGHUP}  # as after `| head`
        if error.errno in ends and output_is_closed():
            return 128 + ends[error.errno]
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        subject = error.filename or ("the output" if is_full else words[0])
        what = f"{subject}: {error.strerror or error}"
        what += "; free some space there, or write elsewhere" if is_full else ""
        if os.readlink("/proc/self/cwd").endswith(" (deleted)"):  # noqa: PTH115 - as Path, absolute
            what = "the current directory was deleted; change to one that exists"
        elif words[0] not in PLAIN:  # the code of a user's model or data may raise it
            raise
        print(sentences(what), file=sys.stderr)
        return 2


def _without_command(words: Sequence[str]) -> int:
    """Print the help or the version, or refuse an unknown command; return the exit code."""
    if words and words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words and words[0] in ("-V", "--version", "version"):
        print(f"rollcall {version()}, in {ROOT}")
        return 0
    if not words:
        print(usage(), file=sys.stderr)
        return 2
    known = [] if words[0][:1] == "-" else [key for key in COMMANDS if COMMANDS[key].by_people]
    from rollcall.config.refusals import about_command  # here: only mistakes need it

    hint = about_command(words[0]) or did_you_mean(words[0], known)
    hint = hint or "; `rollcall --help` lists the commands"
    print(f"rollcall: error: unknown command '{words[0]}'{hint}", file=sys.stderr)
    return 2


def _imported(module: str) -> ModuleType:
    gc.disable()  # while modules are imported, it finds nothing
    try:
        return importlib.import_module(module)
    finally:
        gc.enable()


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
            if PLAIN & {*[*words, *sys.argv[1:]][:1]}:
                how = stream.line_buffering, stream.write_through
                clean = Printable(stream.detach(), stream.encoding, "backslashreplace", None, *how)
                setattr(sys, name, clean)
    with requirements.explain_missing_packages():
        try:
            code = main([*words, *sys.argv[1:]])
        except SystemExit as end:  # of argparse; the interpreter's own end would need the output
            if end.code is not None and not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        leave(code)
