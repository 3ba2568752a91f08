"""A bounded share of `python tests/campaigns/fuzz.py`, which tries thousands of cases."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from checkout import CAMPAIGNS, HELPERS, ROOT


@pytest.mark.long
@pytest.mark.timeout(900)
def test_random_input_gives_no_traceback() -> None:
    """In a process of its own: cases are forks, which must not be made beside torch's threads."""
    done = subprocess.run(
        [sys.executable, str(CAMPAIGNS / "fuzz.py"), "--cases=20", "--seed=1"],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{HELPERS}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout + done.stderr
