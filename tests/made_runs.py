"""Run directories with made-up numbers of any size: `python tests/made_runs.py DIR STEPS RANKS`."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

from rollcall.records.attempt import AttemptEvent
from rollcall.records.phases import Phases
from rollcall.records.run import LoggedStep, Validation, Verdict
from rollcall.run_dir import RunDir

LINES = 400
"""Lines of phases.jsonl of a run."""


def make(run: RunDir, steps: int, ranks: int) -> RunDir:
    """A finished run that logged every step; rank 5 is slow in its last third."""
    run.create()
    draw = random.Random(0)
    # Two million small writes would take longer than the test.
    lines: list[LoggedStep | Validation] = []
    for step in range(1, steps + 1):
        at = step / steps
        loss = 4 * math.exp(-4 * at) + 0.1 + draw.random() * 0.1 + (step % 997 == 0)
        more = {"lr": 1e-3 * (1 - at), "grad_norm": 1 + draw.random()}
        lines.append(LoggedStep(step, loss, 1e5, 1e9 + step, more=more))
        if step % (steps // 20) == 0:
            lines.append(Validation(step, loss * 1.1, 1e9 + step, 1 - loss / 5))
            run.record("checkpointed", step=step, seconds=1.0)
    write_lines(run.metrics, lines)
    add_phases(run, steps, ranks)
    hosts = [f"node{number:03d}" for number in range(max(1, ranks // 8))]
    AttemptEvent(0, "7", "started", 1e9, hosts=hosts, ranks=ranks).append(run.path)
    AttemptEvent(0, "7", "ended", 1e9 + steps, state="finished").append(run.path)
    Verdict("done", steps, "").write(run.path)
    return run


def add_phases(run: RunDir, steps: int, ranks: int) -> None:
    """Write where the time of steps went."""
    draw, lines = random.Random(1), []
    every = max(1, steps // LINES)
    for step in range(every, steps + 1, every):
        phases: dict[str, list[float]] = {name: [] for name in Phases.PHASES}
        for rank in range(ranks):
            late = 0.03 if rank == 5 and step > steps * 2 / 3 else 0.0
            times = [0.002, 0.010, 0.018 + late, 0.035 - late, 0.004, 0.001]
            for name, seconds in zip(Phases.PHASES, times, strict=True):
                phases[name].append(round(seconds * (1 + 0.1 * draw.random()), 6))
        memory = [7e10 + 1e9 * draw.random() for _ in range(ranks)]
        reserved = [each + 4e9 for each in memory]
        lines.append(Phases(step, every, 1e9 + step, 0.07, phases, memory, reserved))
    write_lines(run.path / Phases.FILE, lines)


def write_lines(path: Path, lines: list[LoggedStep | Validation] | list[Phases]) -> None:
    path.write_text("".join(json.dumps(line.as_dict()) + "\n" for line in lines))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    made = RunDir(place.parent, place.name)
    made.create()
    make(made, int(sys.argv[2]), int(sys.argv[3]))
