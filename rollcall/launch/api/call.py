"""Call the function of a run: the program of its ranks, and of `debug=True` in this process.

Words: the file with the function, and the modules that it needs, which `submit` copies for the job.
"""

import os
import pickle
import pickletools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from rollcall.config import trust
from rollcall.messages.refusal import RefusedError
from rollcall.records.run import Verdict
from rollcall.records.run_dir import RunDir
from rollcall.system.files import open_regular, write_atomic

FUNCTION, RESULT = "function.pickle", "result.pickle"
"""Files in `job/`, for the owner of the run alone: what its ranks call, and rank 0's result."""
RUN = "ROLLCALL_RUN_DIR"
"""The variable that names the run directory to every rank."""
PYTHON = "{}.{}".format(*sys.version_info)
HEADER = pickle.dumps(PYTHON)
"""The beginning of both files: functions in them fit this version of Python only."""
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def pack(value: Any) -> bytes:
    """Pickle a value, with the functions and classes in it that a script or a notebook defines."""
    try:
        return HEADER + bytes(cloudpickle.dumps(value))
    except (TypeError, pickle.PicklingError) as error:
        advice = "a function, what it uses and its result are sent as pickles"
        raise RefusedError(f"{error}; {advice}: create or keep this in the function") from None


def load(path: Path) -> Any:
    """Read what `pack` made; raise RefusedError if it is another user's, or another Python's."""
    trust.require_owner(path, "the pickle")
    with open_regular(path) as file:
        if (version := pickle.load(file)) != PYTHON:
            advice = "use the same version, or submit a script instead of a function"
            raise RefusedError(f"{path} is of Python {version}, and this is {PYTHON}: {advice}")
        return pickle.load(file)


def modules(packed: bytes) -> list[str]:
    """Return the imported modules that a packed function names: its ranks need them too."""
    texts = {text for _, text, _ in pickletools.genops(packed[len(HEADER) :])}
    known = {"rollcall", "__main__", *sys.stdlib_module_names}
    return sorted(name for name in {*sys.modules} & texts if name.split(".")[0] not in known)


def checkpoint_dir() -> Path:
    """Return the directory for checkpoints of this rank's run: the same one after a restart.

    Raises:
        RefusedError: this process is not a rank of a run.
    """
    if RUN not in os.environ:
        advice = "start it with rollcall.submit, rollcall.run or `rollcall submit`"
        raise RefusedError(f"checkpoint_dir: this process is not a rank of a run; {advice}")
    folder = Path(os.environ[RUN], "checkpoints")
    folder.mkdir(exist_ok=True)
    return folder


def here(run: RunDir, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Call a function in this process, as the only rank of a new run."""
    run.create()
    run.job.mkdir(exist_ok=True)
    os.environ.update({**ALONE, RUN: str(run.path)})
    write_atomic(run.job / RESULT, pack(function(*arguments)))
    run.conclude(Verdict("done", 0, "the function has returned"))


if __name__ == "__main__":
    function, calls = load(Path(sys.argv[1]))
    result = function(*calls[int(os.environ.get("SLURM_ARRAY_TASK_ID", 0))])
    if os.environ["RANK"] == "0":
        write_atomic(Path(os.environ[RUN], "job", RESULT), pack(result))
