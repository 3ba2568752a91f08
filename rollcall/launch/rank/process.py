"""One rank: its log, its signals, its program, and the record of how it failed."""

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import NoReturn, Self

from rollcall.launch.frameworks import roles
from rollcall.launch.rank import surroundings, user_program
from rollcall.launch.runs.decision import has_failed
from rollcall.records.attempt import RankEnd, RankFailure
from rollcall.system.process import die_with_parent, redirect_output

STACK_SIGNAL = signal.SIGRTMIN + 1
"""At this signal a rank writes the stacks of its threads to its file in memory named STACK_FILE."""
STACK_FILE = "stack-of-rank-{}"
SPAWNED = {"multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver"}
"""Modules that Python imports when a program starts processes other than by fork."""
MAX_BYTES = 1 << 20
"""Size limit of an order: the options of an attempt and its variables, as JSON."""


class RankError(Exception):
    """The ranks of this node could not be started, or one of them failed."""

    def __init__(self, message: str, code: int, rank: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.rank = rank  # None if none has started

    @classmethod
    def of_rank(cls, rank: int, code: int, options: Namespace, why: str = "") -> Self:
        """Return the error for a rank that ended with this code; -n if signal n killed it."""
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        how = f"was ended by {name}" if code < 0 else f"failed, exit code {code}"
        how = ", ".join(filter(None, (how, why)))
        message = f"rank {rank} {how}; its output: {options.log_dir}/rank-{rank}.log"
        return cls(message, 128 - code if code < 0 else code, rank)


def receive(options: Namespace) -> None:
    """Wait for the order of an attempt; apply it."""
    with socket.socket(fileno=os.dup(options.serve)) as orders:
        message, descriptors, _, _ = socket.recv_fds(orders, MAX_BYTES, 1)
    if not message:
        os._exit(0)
    vars(options).update(json.loads(message), port_fd=next(iter(descriptors), None))
    os.environ.update(options.env)


def run_rank(options: Namespace) -> int:
    """Open the rank's log, restore its signals and run the program; return its exit code."""
    rank = os.environ["RANK"]
    path = Path(options.log_dir) / f"rank-{rank}.log"
    redirect_output(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666))
    sys.stdout.reconfigure(line_buffering=not sys.stdout.write_through)  # type: ignore[union-attr]
    # Nothing else would end a rank whose parent is gone (torchrun sends SIGINT, which it handles).
    die_with_parent()
    # USR1 and USR2 stay ignored until the program handles them, so that they cannot kill it early.
    for number in (signal.SIGTERM, signal.SIGHUP):  # the supervisor ignores SIGHUP
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if options.roles and int(rank) not in roles.awaited(options.roles):
        for number in (signal.SIGTERM, signal.SIGINT):  # a server: others need it while they save
            signal.signal(number, signal.SIG_IGN)
    os.environ.pop("TORCHELASTIC_ERROR_FILE", None)  # the supervisor reads the rank's log instead
    stacks = os.memfd_create(STACK_FILE.format(rank))  # a rank may hang on a disk
    faulthandler.register(STACK_SIGNAL, stacks)
    exchange = path.parents[1] / "exchange"
    surroundings.prepare(os.environ, options.framework, exchange, options.ranks, options.roles)
    env = dict(os.environ)
    code, error = _run_program(options)
    if SPAWNED & sys.modules.keys():  # its processes may have joined a group among themselves
        with contextlib.suppress(RuntimeError, OSError):  # the store's host has ended
            surroundings.store(env, exchange).set("processes of a rank", "")
    if has_failed(code):
        record_failure(options, f"rank-{rank}", code, error, int(rank))
    if options.start_method == "torchrun":  # which does not say how ranks ended without a failure
        record_end(options, int(rank), code)
    return code


def exit_rank(code: int) -> NoReturn:
    """End a forked rank as the interpreter ends, except for unloading torch (half a second)."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a full disk, or the program has closed it
            code = code or 120  # Python's own code for this
    user_program.close_files()
    if "PMI_FD" in os.environ:  # mpi4py and MPICH end the job in handlers of the interpreter and C
        ctypes.pythonapi.Py_Exit(code)
    os._exit(code)


def _run_program(options: Namespace) -> tuple[int, str]:
    """Run the program as __main__; return its exit code and the exception it raised, if any."""
    try:
        user_program.run(options.program)
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return (exit_.code or 0) & 0xFF, ""
        print(exit_.code, file=sys.stderr)
        return 1, str(exit_.code)
    except BaseException as error:
        user_program.show_error(error)
        if isinstance(error, KeyboardInterrupt):
            return 128 + signal.SIGINT, "KeyboardInterrupt"
        return 1, f"{type(error).__name__}: {error}"
    return 0, ""


def record_end(options: Namespace, rank: int, code: int) -> None:
    """Write beside the logs how and when a rank ended; the code is -n if signal n ended it."""
    with contextlib.suppress(OSError):  # the disk is full
        RankEnd(time.time(), rank, code if code >= 0 else 128 - code).append(Path(options.log_dir))


def record_failure(
    options: Namespace, who: str, code: int, error: str, rank: int | None, replace: bool = True
) -> None:
    """Write beside the logs how and when a rank failed, so that the first failure can be found.

    `who` names the file: the rank, or `agent`. The code is 128 + n if signal n killed the rank; the
    rank is None if none has started. With `replace`, it takes the place of an earlier record.
    """
    path = Path(options.log_dir)
    failure = RankFailure(time.time(), socket.gethostname(), code, error, rank, who)
    with contextlib.suppress(OSError):  # report the failure itself rather than this one
        if replace or not RankFailure.path_in(path, who=who).exists():
            failure.write(path)
