"""A Python without torch, for runs of which torch is no part: without its import they are quick."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The option of `rollcall submit` for an environment without packages."""
    place = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    return f"--python={place}"
