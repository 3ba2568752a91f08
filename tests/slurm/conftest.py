"""One Slurm cluster for all the tests here: real daemons, four nodes with four fake GPUs each."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Lab, running_lab


@pytest.fixture(scope="session")
def lab_options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of slurm/lab/up that show its hosts what the tests keep below /tmp, as tmp_path."""
    needed = (tmp_path_factory.getbasetemp(), Path.cwd(), Path.home(), Path(sys.prefix))
    below_tmp = [path for path in map(Path.resolve, needed) if Path("/tmp") in path.parents]
    return [word for path in below_tmp for word in ("--share", str(path))]


@pytest.fixture(scope="session")
def lab(lab_options: list[str]) -> Iterator[Lab]:
    """The cluster. ROLLCALL_LAB_PROCTRACK says how its Slurm tracks processes (default: cgroup)."""
    proctrack = os.environ.get("ROLLCALL_LAB_PROCTRACK", "cgroup")
    with running_lab(f"test-{os.getpid()}", "--proctrack", proctrack, *lab_options) as lab:
        yield lab
