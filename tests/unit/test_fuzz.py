"""A bounded share of `python tests/fuzz.py`, which tries thousands of cases."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_random_input_gives_no_traceback() -> None:
    """In a process of its own: cases are forks, which must not be made beside torch's threads."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "fuzz.py"), "--cases=40", "--seed=1"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
