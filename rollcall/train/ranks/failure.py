"""Write down the exception that ends a rank, where launchers and `rollcall why` look for it."""

import contextlib
import os
import socket
import sys
import sysconfig
import time
import traceback
from pathlib import Path
from types import TracebackType

from rollcall.cli.installation import PACKAGED, ROOT
from rollcall.messages import refusal
from rollcall.records.attempt import LOST_PEER, RankFailure
from rollcall.records.run_dir import RunDir


def tell_torchrun(error: BaseException) -> None:
    """Write torchrun's error file, if torchrun started this rank and no other code has written it.

    torchrun shows the earliest error, in whole seconds: the one of a rank that only lost its peers
    counts as later.
    """
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    text = describe(error)
    when = time.time() + (2 if LOST_PEER.search(text) else 0)
    stack = "".join(traceback.format_exception(error))
    file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    with contextlib.suppress(OSError):
        if not file.exists():
            refusal.tell_torchrun(file, text, when, py_callstack=stack)


def tell_run(run: RunDir, rank: int, error: BaseException) -> None:
    """Write the failure into the run directory, if no supervisor does, and it was not deleted."""
    if "ROLLCALL_WORLD_SIZE" in os.environ or not run.path.exists():
        return
    host, who = socket.gethostname(), f"rank-{rank}"
    with contextlib.suppress(OSError):
        place = run.logs_by_hand / f"node-{os.environ.get('GROUP_RANK', '0')}"
        place.mkdir(parents=True, exist_ok=True)
        RankFailure(time.time(), host, 1, describe(error), rank, who).write(place)


def show(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """Print an exception without the frames of rollcall and packages above the user's code."""
    ours = *(f"{ROOT}/{part}" for part in PACKAGED), f"{sysconfig.get_path('stdlib')}/", "<"
    users = frames
    while users is not None and (file := users.tb_frame.f_code.co_filename):
        if not (file.startswith(ours) or "/site-packages/" in file):
            break
        users = users.tb_next
    sys.__excepthook__(kind, error.with_traceback(users or frames), users or frames)


def describe(error: BaseException) -> str:
    """Return the type and the message of an exception."""
    if isinstance(error, SystemExit):
        text = f"data, a model or a callback called sys.exit({error.code!r})"
        return f"{text}; raise an exception, or return Action.STOP"
    return f"{type(error).__name__}: {error}"
