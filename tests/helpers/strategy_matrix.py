"""Runs saved under each strategy and resumed under each other one, beside one process."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollcall.tools.bench.rank_jobs import SAVED_AT, STEPS, TOLERANCE, WORDS, Job, apart, run

STRATEGIES = ("ddp", "zero1", "zero3", "hsdp", "pipeline", "tensor")
SAVED_ON, RESUMED_ON, RANKS_OF_A_NODE = 4, 2, 2


def measure(scratch: Path, words: Sequence[str] = ()) -> dict[tuple[str, str], float]:
    """Return the largest relative difference of a loss, by strategies that saved and resumed."""

    def job(name: str, strategy: str) -> Job:
        return Job(scratch / name, [*WORDS, *words, f"parallel.strategy={strategy}"])

    alone = job("alone", "single")
    saved = {name: job(f"saved-{name}", name) for name in STRATEGIES}
    run([alone], scratch / "logs-1", 1)
    run(list(saved.values()), scratch / "logs-4", SAVED_ON, RANKS_OF_A_NODE)
    cells = {
        (source, target): job(f"{source}-{target}", target)
        for source in STRATEGIES
        for target in STRATEGIES
    }
    for (source, _), resumed in cells.items():
        checkpoint = saved[source].run_dir.checkpoints / f"step-{SAVED_AT:08d}"
        shutil.copytree(checkpoint, resumed.run_dir.checkpoints / checkpoint.name)
    run(list(cells.values()), scratch / "logs-2", RESUMED_ON, RANKS_OF_A_NODE)
    expected = alone.losses()[SAVED_AT:]
    return {names: apart(one.losses(), expected) for names, one in cells.items()}


def table(cells: Mapping[tuple[str, str], float]) -> str:
    """Return the matrix as text."""
    sources = list(dict.fromkeys(source for source, _ in cells))
    targets = list(dict.fromkeys(target for _, target in cells))
    held = sum(found <= TOLERANCE for found in cells.values())
    lines = [
        f"largest relative difference from one process, of the losses of steps {SAVED_AT + 1} to "
        f"{STEPS} and the evaluation;",
        f"rows: saved on {SAVED_ON} ranks, columns: resumed on {RESUMED_ON} ranks",
        "",
        "".join(f"{word:>10}" for word in ["", *targets]),
        *(
            f"{source:>10}" + "".join(f"{cells[source, target]:>10.1e}" for target in targets)
            for source in sources
        ),
        "",
        f"{held} of {len(cells)} within {TOLERANCE:.0e}",
    ]
    return "\n".join(lines)
