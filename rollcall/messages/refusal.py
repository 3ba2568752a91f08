"""Show a refusal once, however many ranks refuse the request. No torch.

Launchers end all ranks as soon as one has ended, so the output of another one may be lost. Under
torchrun the first rank therefore writes its reason to torchrun's error file, and torchrun shows it
after all ranks have ended. Under other launchers rank 0 prints, and the others wait for it.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollcall.messages.text import is_first_rank
from rollcall.system.files import write_atomic

PATIENCE = 5.0
"""Seconds that the other ranks wait for the one that prints; most launchers end them earlier."""
REFUSED = 2
"""Exit code of a process whose request was refused."""
FENCED = 77
"""Exit code of a rank that gives way, because another attempt of its run has begun."""


class RefusedError(Exception):
    """A request that cannot be met; the user sees the message without a traceback."""


class ConfigError(RefusedError, ValueError):
    """An invalid configuration; the message names the expected value and the remedy."""


class RankError(ConfigError):
    """A refusal by one rank in a forward or backward pass, in which the others wait for it."""


@contextmanager
def refusing(subject: str, advice: str = "") -> Iterator[None]:
    """Raise a ConfigError with the reason for an OSError of the context."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{subject}: {error.strerror or error}{advice}") from None


def sentences(error: Exception | str) -> str:
    """Return the lines that explain a refusal."""
    return "\n".join(f"rollcall: error: {line}" for line in str(error).splitlines())


def refuse(error: Exception | str, everywhere: bool = True, patience: float = PATIENCE) -> int:
    """Show the reason of a refusal, one sentence per line; return the exit code.

    If all ranks refuse `everywhere`, one prints, and the others wait for it with `patience`.
    """
    text = sentences(error)
    is_shown = _write_error_file(text)
    if is_shown is None and (is_shown := is_first_rank() or not everywhere):
        print(text, file=sys.stderr, flush=True)
    if not is_shown:
        time.sleep(patience)
    return REFUSED


def tell_torchrun(file: Path, text: str, when: float, **more: str) -> None:
    """Write torchrun's error file, as torch.distributed.elastic does."""
    message = {"message": text, "extraInfo": {**more, "timestamp": str(int(when))}}
    write_atomic(file, json.dumps({"message": message}))


def _write_error_file(text: str) -> bool | None:
    """Write torchrun's error file; False if another rank has done so, None without torchrun."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return None
    file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])  # <attempt>/<local rank>/error.json
    try:
        (file.parents[1] / "refused").touch(exist_ok=False)
        tell_torchrun(file, text, time.time())
    except FileExistsError:
        return False
    except OSError:
        return None
    return True
