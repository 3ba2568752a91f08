"""Exact mode on a GPU: a repeated or resumed run ends with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import train

from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines


@pytest.mark.parametrize("recipe", ["digits", "gpt"])
def test_a_repeated_or_resumed_run_has_the_same_hash(tmp_path: Path, recipe: str) -> None:
    """Exact mode repeats a run to the last bit. 3 min."""

    def weights(name: str, steps: int) -> str:
        words = [recipe, "device=cuda", "exact=true", "model.dropout=0.1", f"train.steps={steps}"]
        words += ["optim.schedule=constant", f"run.root={tmp_path}", f"run.name={name}"]
        train(1, words, tmp_path / name)
        events = read_lines(RunDir(tmp_path, name).events)
        return [str(line["weights"]) for line in events if line["event"] == "finished"][-1]

    whole = weights("whole", 20)
    assert weights("repeated", 20) == whole
    assert weights("parts", 10) != whole
    assert weights("parts", 20) == whole
