"""A few of the planted faults of tests/first_causes.py, with real processes on three nodes."""

from pathlib import Path

import pytest
from first_causes import Case, is_right, names_victim, plant

CASES = (
    Case("rank", "os._exit 0", "middle", 1),
    Case("rank", "stopped", "middle", 0, 2),
    Case("agent", "SIGKILL", "middle", 1),
    Case("supervisor", "SIGKILL", "middle", 2),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_process_at_fault_is_named(tmp_path: Path, case: Case) -> None:
    said = plant(case, tmp_path / "case")
    assert is_right(case, said) and not names_victim(case, said), said
