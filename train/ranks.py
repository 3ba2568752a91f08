"""What does a rank do before and after its program? Its log, its signals, how it has ended."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import faulthandler
import json
import logging
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from train.orphans import die_with_parent
from train.run import write_atomic

STACK_SIGNAL = signal.SIGRTMIN + 1
"""At this signal a rank writes the stacks of its threads to its file in memory named STACK_FILE."""
STACK_FILE = "stack-of-rank-{}"


def be_rank(options: argparse.Namespace) -> NoReturn:
    """Be one rank: open its log, restore its signals, run the program as __main__, exit."""
    rank = os.environ["RANK"]
    log = os.open(
        Path(options.log_dir) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666
    )
    # The descriptors themselves: what C++ prints goes there too.
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    logging.disable(logging.NOTSET)
    # A rank whose agent is gone has nobody to end it (torch's choice is SIGINT, which it handles).
    die_with_parent()
    # USR1 and USR2 stay ignored until the program has handlers: they must not end it before.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    expected = str(options.nnodes * options.nproc_per_node)
    if os.environ["WORLD_SIZE"] != expected:
        print(
            f"rank {rank} found a world of {os.environ['WORLD_SIZE']} ranks, but {expected} are "
            "expected: the nodes were started with different numbers of ranks",
            file=sys.stderr,
        )
        code, error = 2, ""
    else:
        stacks = os.memfd_create(STACK_FILE.format(rank))  # no disk: that may be what a rank awaits
        faulthandler.register(STACK_SIGNAL, stacks)
        code, error = _run_program(options)
    if code not in (0, os.EX_TEMPFAIL):
        tell(options, f"rank-{rank}", code, error, int(rank))
    if options.start_method == "fork":
        atexit._run_exitfuncs()  # multiprocessing leaves them out before Python 3.13
    # None, not 0: torch would keep a forked rank that exits with 0 (2.11, 2.15).
    raise SystemExit(code or None)


def _run_program(options: argparse.Namespace) -> tuple[int, str]:
    """Run the program as __main__; return its exit code and, if it raised, what."""
    sys.argv = [options.program, *options.arguments]
    try:
        if options.module:
            runpy.run_module(options.program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(options.program).resolve().parent)
            runpy.run_path(options.program, run_name="__main__")
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return (exit_.code or 0) & 0xFF, ""
        print(exit_.code, file=sys.stderr)
        return 1, str(exit_.code)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, "KeyboardInterrupt"
    except BaseException as error:
        sys.excepthook(*sys.exc_info())  # as the interpreter would; it may be the program's own
        return 1, f"{type(error).__name__}: {error}"
    return 0, ""


def tell(options: argparse.Namespace, who: str, code: int, error: str, rank: int | None) -> None:
    """Write beside the logs how a rank failed, and when, for whoever looks for the first one.

    Args:
        options: the agent's.
        who: names the file: the rank, or the agent for what its ranks cannot tell themselves.
        code: exit code; 128 + n if signal n ended the rank.
        error: type and message of the exception, if it was one.
        rank: the rank that failed; None if none has started.
    """
    failure = {"time": time.time(), "host": socket.gethostname(), "rank": rank}
    text = json.dumps({**failure, "exit_code": code, "error": error}) + "\n"
    with contextlib.suppress(OSError):  # the failure itself matters more
        write_atomic(Path(options.log_dir) / f"{who}.failed.json", text)
