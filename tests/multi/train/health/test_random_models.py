"""A share of `python tests/campaigns/random_models.py`, which trains hundreds of models."""

from __future__ import annotations

from pathlib import Path

import pytest
import random_models


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_random_models_train_as_in_a_plain_loop_or_are_refused(tmp_path: Path) -> None:
    (tmp_path / random_models.QUICK).touch()
    ends = random_models.check([random_models.Case.of(n, seed=1) for n in range(20)], tmp_path)
    kinds = [end.partition(":")[0] for end in ends.values()]
    bad = {name: end for name, end in ends.items() if end.partition(":")[0] in random_models.BAD}
    assert bad == {}
    assert kinds.count("equal") >= 15 and kinds.count("refused") >= 15
