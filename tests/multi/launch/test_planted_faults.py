"""A few planted faults of tests/campaigns/first_causes.py, with real processes on three nodes."""

from pathlib import Path

import pytest
from first_causes import Case, answer, is_right, names_victim, plant, problems

pytestmark = pytest.mark.long
CASES = (
    Case("rank", "stopped", "middle", 0, 2),
    Case("agent", "SIGKILL", "middle", 1),
    Case("supervisor", "SIGKILL", "middle", 2),
)
IN_TRAININGS = (
    Case("rank", "os._exit 75", "often", 0, 1, trains=True, once=True),
    Case("rank", "locked", "saved", 0, 1, trains=True, once=True),
)


@pytest.mark.parametrize("case", IN_TRAININGS, ids=str)
def test_each_restart_names_the_rank_that_left_first(tmp_path: Path, case: Case) -> None:
    said = answer(case, tmp_path / "case")
    assert problems(case, said) == [], said


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_process_at_fault_is_named(tmp_path: Path, case: Case) -> None:
    said = plant(case, tmp_path / "case")
    assert is_right(case, said) and not names_victim(case, said), said
