"""A Slurm cluster for the tests here: real daemons, four nodes with four fake GPUs each."""

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
def proctrack(request: pytest.FixtureRequest) -> str:
    """How Slurm tracks the processes of a job."""
    return str(getattr(request, "param", "cgroup"))


@pytest.fixture(scope="session")
def lab(lab_options: list[str], proctrack: str) -> Iterator[Lab]:
    """The cluster; each process that runs tests has its own."""
    name = f"test-{os.getpid()}-{proctrack}"
    with running_lab(name, "--proctrack", proctrack, *lab_options) as lab:
        yield lab
