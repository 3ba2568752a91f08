"""A share of `python tests/campaigns/random_models.py`, which trains hundreds of models."""

from __future__ import annotations

from pathlib import Path

import pytest
import random_models


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_random_models_train_as_in_a_plain_loop_or_are_refused(tmp_path: Path) -> None:
    ends: dict[str, str] = {}
    for first in range(0, 10, random_models.AT_ONCE):
        numbers = range(first, first + random_models.AT_ONCE)
        cases = [random_models.Case.of(number, seed=1) for number in numbers]
        (folder := tmp_path / f"{first}").mkdir()
        ends |= random_models.check(cases, folder)
    kinds = [end.partition(":")[0] for end in ends.values()]
    bad = {name: end for name, end in ends.items() if end.partition(":")[0] in random_models.BAD}
    assert bad == {}
    assert kinds.count("equal") >= 5 and kinds.count("refused") >= 5
