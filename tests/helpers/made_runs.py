"""Run directories with made-up numbers of any size: `python made_runs.py DIR STEPS RANKS`."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

from rollcall.records.attempt import AttemptEvent
from rollcall.records.phases import Phases
from rollcall.records.run import LoggedStep, Validation, Verdict
from rollcall.records.run_dir import RunDir

LINES = 400
"""Lines of phases.jsonl of a run."""


def make(run: RunDir, steps: int, ranks: int) -> RunDir:
    """A finished run that logged every step; rank 5 is slow in its last third."""
    run.create()
    run.job.mkdir()
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
    """Write where the time of steps went, for about LINES groups of steps."""
    every = max(1, steps // LINES)
    texts = [_phases(every, ranks, late) for late in (0.0, 0.03)]
    with (run.path / Phases.FILE).open("w") as file:
        for step in range(every, steps + 1, every):
            file.write(texts[step > steps * 2 / 3].replace('"step": 0', f'"step": {step}') + "\n")


def _phases(steps: int, ranks: int, late: float) -> str:
    """A line, of which only the step has to be set."""
    draw = random.Random(1)
    phases: dict[str, list[float]] = {name: [] for name in Phases.PHASES}
    for rank in range(ranks):
        more = late if rank == 5 else 0.0
        times = [0.002, 0.010, 0.018 + more, 0.035 - more, 0.004, 0.001]
        for name, seconds in zip(Phases.PHASES, times, strict=True):
            phases[name].append(round(seconds * (1 + 0.1 * draw.random()), 6))
    memory = [round(7e10 + 1e9 * draw.random()) * 1.0 for _ in range(ranks)]
    line = Phases(0, steps, 1e9, 0.07, phases, memory, [each + 4e9 for each in memory])
    return json.dumps(line.as_dict())


def write_lines(path: Path, lines: list[LoggedStep | Validation]) -> None:
    path.write_text("".join(json.dumps(line.as_dict()) + "\n" for line in lines))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    made = RunDir(place.parent, place.name)
    make(made, int(sys.argv[2]), int(sys.argv[3]))
