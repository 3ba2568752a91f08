"""Give rollcall random input, and report every traceback, crash, hang and refusal without a word.

`PYTHONPATH=.:tests/helpers python tests/campaigns/fuzz.py --cases 2000` tries 2,000 cases of each
kind: command lines with configurations (`words`), damaged run directories (`runs`) and mutated
sbatch scripts (`scripts`). A case depends only on its kind, its number and the seed. A report ends
with the command that repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import io
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, TextIO

import fuzz_runs
import fuzz_words

from rollcall.cli import program as cli
from rollcall.cli.commands import COMMANDS

PATIENCE = 60.0
"""Seconds after which a command counts as hanging."""
CODES = {0, 1, 2, 75, 130}
"""Exit codes of commands that end in order."""


class Kind(Protocol):
    """A generator of one kind of input."""

    def commands(self, chance: random.Random, place: Path) -> list[list[str]]:
        """Write a case's files into an empty directory; return the commands that must bear them."""


KINDS: dict[str, Callable[[Path], Kind]] = {
    "words": fuzz_words.Words,
    "runs": fuzz_runs.Runs,
    "scripts": fuzz_words.Scripts,
}


def main() -> int:
    """Try the cases that the command line asks for; return 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: all")
    parser.add_argument("--cases", type=int, default=2000, help="of each kind")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failed = 0
    for kind in options.kind or KINDS:
        began = time.monotonic()
        numbers = range(options.first, options.first + options.cases)
        count = 0
        for report in reports(kind, numbers, options.seed):
            count += 1
            print(report, flush=True)
        seconds = time.monotonic() - began
        print(f"{kind}: {count} of {len(numbers)} cases failed ({seconds:.0f} s)", flush=True)
        failed += count
    return 1 if failed else 0


def reports(name: str, numbers: range, seed: int) -> Iterator[str]:
    """Try the cases with these numbers; yield a report of each failure."""
    for command in COMMANDS.values():  # now, and not in each child
        importlib.import_module(f"rollcall.{command.module}")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        root = Path(folder)
        with surroundings(root):
            kind = KINDS[name](root / "template")
            for number in numbers:
                if problem := _try(kind, root, random.Random(f"{name} {number} {seed}")):
                    again = f"--kind {name} --first {number} --cases 1 --seed {seed}"
                    yield f"{problem.rstrip()}\nto repeat: python tests/campaigns/fuzz.py {again}\n"


@contextlib.contextmanager
def surroundings(root: Path) -> Iterator[None]:
    """Shield the user's files; put a squeue on PATH that knows no job, and others that fail."""
    tools = root / "bin"
    tools.mkdir()
    failing = dict.fromkeys(("sbatch", "sacct", "scontrol", "scancel", "sinfo", "srun"), 1)
    for name, code in {**failing, "squeue": 0, "ssh": 255}.items():
        (tools / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tools / name).chmod(0o755)
    variables = {"HOME": root, "XDG_CONFIG_HOME": root, "PATH": f"{tools}:{os.environ['PATH']}"}
    with _environment({name: str(value) for name, value in variables.items()}):
        yield


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def _try(kind: Kind, root: Path, chance: random.Random) -> str:
    """Run one case in a child, which may crash or hang; return what is wrong, or nothing."""
    place, log = root / "case", root / "log"
    place.mkdir()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with log.open("w+") as file:
                code = _bear(kind, place, file, chance)
        except BaseException:
            log.write_text(traceback.format_exc())
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    _remove(place)
    told = log.read_text(errors="replace")
    if os.WIFSIGNALED(status):
        return f"{told}ended by {signal.Signals(os.WTERMSIG(status)).name}\n"
    return told if os.waitstatus_to_exitcode(status) else ""


def _remove(place: Path) -> None:
    for folder, _, _ in os.walk(place, onerror=lambda error: Path(error.filename).chmod(0o700)):
        Path(folder).chmod(0o700)
    shutil.rmtree(place)


def _bear(kind: Kind, place: Path, log: TextIO, chance: random.Random) -> int:
    """Run a case's commands until one fails; return 1 if one does, with the reason in the log."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    os.dup2(log.fileno(), 2)
    for command in kind.commands(chance, place):
        os.chdir(place)
        log.seek(0)
        log.truncate()
        words = shlex.join(word if len(word) < 200 else f"{word[:200]}..." for word in command)
        log.write(f"rollcall {words}\n".encode(errors="backslashreplace").decode())
        log.flush()
        faulthandler.dump_traceback_later(PATIENCE, exit=True, file=log)
        problem = _problem(command)
        faulthandler.cancel_dump_traceback_later()
        if problem:
            log.write(problem)
            return 1
    return 0


def _problem(words: list[str]) -> str:
    """Run one command in this process; return what is wrong with how it ends, or nothing."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    error = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = cli.main(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            return traceback.format_exc()
    text = error.buffer.getvalue().decode()
    if "Traceback (most recent" in text:
        return text
    codes = {0} if words == ["status"] else CODES  # one damaged run must not hide the others
    if code not in codes or (code == 2 and not text.strip()):
        return f"exit code {code}; {text or 'not a word'}\n"
    return ""


if __name__ == "__main__":
    sys.exit(main())
