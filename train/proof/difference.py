"""Where do two exact runs part, and why? Reads what `trace.py` wrote. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from train.run import RunDir, read_lines

FINGERPRINTS = "fingerprints.jsonl"
# In the order in which a step computes them, with what is to blame if all before them are equal.
WEIGHTS, SAMPLES, LOSSES, GRADIENTS = "weights", "samples", "losses", "gradients"
BLAME = {
    WEIGHTS: "the gradients before it are equal, so look at what changes weights: clipping, the "
    "optimizer, the learning rate, or code that writes to them",
    SAMPLES: "the weights are equal, so look at the data: its files, order and transformations",
    LOSSES: "weights and samples are equal, so look at the forward pass: the model's code, what it "
    "draws at random, the kernels of the device",
    GRADIENTS: "weights, samples and losses are equal, so look at the backward pass and at how "
    "gradients are added up",
}
PLACES = {
    WEIGHTS: "the weights {} before step {}",
    SAMPLES: "the samples of virtual shard {} of step {}",
    LOSSES: "the loss of virtual shard {} of step {}",
    GRADIENTS: "the gradient of {} in step {}",
}


@dataclass(frozen=True)
class Difference:
    """The first thing in which two runs differ.

    Attributes:
        step: from 1; the one that computed it, or would have begun with it.
        kind: weights, samples, losses or gradients.
        name: of the tensor, or number of the virtual shard.
        among: how many of this kind differ in this step, and how many there are.
    """

    step: int
    kind: str
    name: str
    among: tuple[int, int]

    def __str__(self) -> str:
        differing, total = self.among
        place = PLACES[self.kind].format(self.name, self.step)
        return f"step {self.step}: first in {place} ({differing} of {total} differ)"

    @property
    def blame(self) -> str:
        """What it points at."""
        if self.kind == WEIGHTS and self.step == 1:
            return "nothing was trained yet, so look at how the model is made and initialized"
        return BLAME[self.kind]


def first(a: RunDir, b: RunDir) -> Difference | None:
    """The first difference in what two runs wrote down of their steps, if there is one."""
    steps, others = _steps(a), _steps(b)
    for step in sorted(steps.keys() & others.keys()):
        for kind in BLAME:
            names = _differing(steps[step].get(kind, {}), others[step].get(kind, {}))
            if names:
                # Backward computes the gradients of the last layers first.
                name = names[-1 if kind == GRADIENTS else 0]
                return Difference(step, kind, name, (len(names), len(steps[step][kind])))
    return None


def circumstances(a: RunDir, b: RunDir) -> Iterator[str]:
    """What else differs between two runs: configuration, versions, hardware, code."""
    settings, others = _settings(a), _settings(b)
    for key in _differing(settings, others):
        yield f"{key}: {settings.get(key)} against {others.get(key)}"
    mine, theirs = _facts(a), _facts(b)
    code, other_code = mine.pop("code", {}), theirs.pop("code", {})
    for key in _differing(mine, theirs):
        yield f"{key}: {_listed(mine.get(key))} against {_listed(theirs.get(key))}"
    shared = code.keys() & other_code.keys()
    changed = [name for name in code if name in shared and code[name] != other_code[name]]
    if changed:
        yield f"the source of {', '.join(changed)}"


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [name for name in {**a, **b} if a.get(name) != b.get(name)]


def _steps(run_dir: RunDir) -> dict[int, dict[str, Any]]:
    lines = read_lines(run_dir.path / FINGERPRINTS)
    return {line["step"]: line for line in lines if "step" in line}


def _facts(run_dir: RunDir) -> dict[str, Any]:
    """The facts of all attempts: a value where they agree, else a list."""
    found: dict[str, list[Any]] = {}
    for line in read_lines(run_dir.path / FINGERPRINTS):
        for name, value in line.get("facts", {}).items():
            if name != "host" and value not in found.setdefault(name, []):
                found[name].append(value)
    code = {name: text for values in found.pop("code", []) for name, text in values.items()}
    return {**found, "code": code}


def _listed(values: Any) -> str:
    return " and ".join(str(value) for value in values or ["nothing"])


def _settings(run_dir: RunDir) -> dict[str, Any]:
    """The configuration by dotted keys, without the run's own place."""
    values = yaml.load(run_dir.config.read_text(), yaml.CSafeLoader)
    return dotted({section: group for section, group in values.items() if section != "run"})


def dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in groups, by dotted names."""
    return {
        f"{section}.{key}" if key else section: value
        for section, group in values.items()
        for key, value in (group.items() if isinstance(group, dict) else [("", group)])
    }
