"""Run the ranks of a job in a container: with Slurm's plugin pyxis, or with Apptainer."""

import re
import shutil
import subprocess
from collections.abc import Sequence

from rollcall.launch.program.python import ProgramError

PROGRAMS = ("apptainer", "singularity")


def plan(
    image: str, mounts: Sequence[str], directory: str, has_gpus: bool, with_srun: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return further options of srun, and the words before the interpreter, for a container.

    Args:
        image: a file, or the name of an image in a registry.
        mounts: directories of the host, as PATH or PATH:PATH-INSIDE.
        directory: where the command starts.
        has_gpus: whether the host's GPU driver is needed inside.
        with_srun: whether srun starts the command.

    Raises:
        ProgramError: this machine has neither pyxis nor Apptainer.
    """
    if with_srun and _srun_has("--container-image"):
        both = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts)
        options = (f"--container-image={image}", f"--container-mounts={both}")
        return (*options, f"--container-workdir={directory}"), ()
    program = next(filter(shutil.which, PROGRAMS), None)
    if program is None:
        raise ProgramError(
            f"--container {image}: srun has no option --container-image (the pyxis plugin), and "
            f"neither {' nor '.join(PROGRAMS)} is on PATH"
        )
    gpus = ["--nv"] if has_gpus else []
    bound = f"--bind={','.join(mounts)}"
    return (), (program, "exec", *gpus, bound, f"--pwd={directory}", image)


def _srun_has(option: str) -> bool:
    try:
        told = subprocess.run(["srun", "--help"], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return re.search(rf"{option}\b", told.stdout) is not None
