"""Find the first step and tensor in which two exact runs differ, by fingerprints. No torch."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines

FINGERPRINTS = "fingerprints.jsonl"
KINDS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("kinds.toml").read_text())
"""Quantities of a step, from kinds.toml: for each kind its place in words, and likely causes."""


@dataclass(frozen=True)
class Difference:
    """The first value in which two runs differ."""

    step: int  # that computed it, or would have started with these weights; from 1
    kind: str  # a key of KINDS
    name: str  # of the tensor, or the number of the virtual shard
    counts: tuple[int, int]  # how many of this kind differ in this step, and how many there are

    def __str__(self) -> str:
        differing, total = self.counts
        where = KINDS[self.kind]["place"].format(self.name, self.step)
        return f"first difference: {where} ({differing} of {total} differ)"

    @property
    def likely_cause(self) -> str:
        """The part of the code in which to look for the cause."""
        if self.kind == "weights" and self.step == 1:
            return "no step was trained yet, so look at how the model is built and initialized"
        return KINDS[self.kind]["cause"]


def first(a: RunDir, b: RunDir) -> Difference | None:
    """Find the first difference between the steps that both runs have recorded."""
    steps, others = _steps(a), _steps(b)
    for step in sorted(steps.keys() & others.keys()):
        for kind in KINDS:
            mine, theirs = (values[step].get(kind, {}) for values in (steps, others))
            if names := [name for name in mine | theirs if mine.get(name) != theirs.get(name)]:
                # The backward pass computes the gradients of the last layers first.
                name = names[-1 if kind == "gradients" else 0]
                return Difference(step, kind, name, (len(names), len(mine)))
    return None


def _steps(run_dir: RunDir) -> dict[int, dict[str, Any]]:
    lines = read_lines(run_dir.path / FINGERPRINTS)
    return {line["step"]: line for line in lines if "step" in line}
