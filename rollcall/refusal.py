"""Show a refusal once, however many ranks refuse the request. No torch.

Launchers end all ranks as soon as one has ended, so what another one would print may be lost. Under
torchrun the first rank therefore writes its reason to torchrun's error file, and torchrun shows it
after all ranks have ended. Under other launchers rank 0 prints, and the others wait for it.
"""

import json
import os
import sys
import time
from pathlib import Path

from rollcall.records.files import write_atomic

PREFIX = "rollcall: error: "
PATIENCE = 5.0
"""Seconds that the other ranks wait for the one that prints; most launchers end them before."""
REFUSED = 2
"""Exit code of a process whose request was refused."""


class RefusedError(Exception):
    """A request that cannot be met: the user gets the message, without a traceback."""


class ConfigError(RefusedError, ValueError):
    """A wrong configuration; the message says what was expected and what to do."""


def sentences(error: Exception | str) -> str:
    """Return the lines that say why a request is refused."""
    return "\n".join(PREFIX + line for line in str(error).splitlines())


def refuse(error: Exception | str, everywhere: bool = True, patience: float = PATIENCE) -> int:
    """Show why a request is refused; return the exit code.

    Args:
        error: the reason, one sentence in each line.
        everywhere: whether all ranks refuse the request for the same reason.
        patience: seconds that a rank waits if another one prints the reason.
    """
    text = sentences(error)
    speaks = _write_error_file(text)
    if speaks is None:
        names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
        rank = next((os.environ[name] for name in names if name in os.environ), "0")
        speaks = rank == "0" or not everywhere
        if speaks:
            print(text, file=sys.stderr, flush=True)
    if not speaks:
        time.sleep(patience)
    return REFUSED


def tell_torchrun(file: Path, text: str, when: float, **more: str) -> None:
    """Write torchrun's error file, as torch.distributed.elastic does."""
    said = {"message": text, "extraInfo": {**more, "timestamp": str(int(when))}}
    write_atomic(file, json.dumps({"message": said}))


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
