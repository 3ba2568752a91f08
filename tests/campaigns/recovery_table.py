"""Measure how a training recovers from the loss of a rank, in three ways.

    PYTHONPATH=.:tests/helpers python tests/campaigns/recovery_table.py --repeats 5

A host is a supervisor on this machine. The ways take turns: in each turn, the last
rank of a separate run is killed after some steps. The table says how long it took until ranks
trained again, and until all did, how many steps were done again, and how far the final weights are
from the weights of an undisturbed run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import lost_ranks
import torch

from rollcall.records.run import ForgottenStep
from rollcall.tools.bench import turns

STEPS, EVERY, KILLED_AFTER = 300, 40, 90
"""Steps of a run and between its checkpoints; the step after which a rank is killed."""
ON_DISK = ["parallel.strategy=zero1", f"checkpoint.every={EVERY}"]
WAYS = {
    "restart from the checkpoint on disk": ON_DISK,  # nobody else has the lost state
    "restart from the step that a replica saves": [],
    "continue without the replica": [lost_ranks.CONTINUE],
}
SHAPES = ((2, 2), (4, 2))
"""Hosts, and ranks of each."""


def main(argv: Sequence[str]) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=turns.count, default=5, metavar="N")
    parser.add_argument("--hosts", type=int, help="only runs on this number")
    options = parser.parse_args(argv)
    for name, text in turns.surroundings().items():
        print(f"{name}: {text}")
    with tempfile.TemporaryDirectory(prefix="recoveries-") as folder:
        for hosts, ranks in SHAPES:
            if options.hosts in (None, hosts):
                _measure(Path(folder, str(hosts)), hosts, ranks, options.repeats)
    return 0


def _measure(root: Path, hosts: int, ranks: int, repeats: int) -> None:
    plain: dict[str, dict[str, torch.Tensor]] = {}
    for name, words in WAYS.items():
        with lost_ranks.submitted(root, f"plain-{len(plain)}", hosts, ranks, *_words(words)) as (
            run,
            problem,
        ):
            assert not problem(), problem()
        plain[name] = lost_ranks.weights(run, STEPS)
    ways = {
        name: partial(_lose, root, hosts, ranks, name, words, plain[name])
        for name, words in WAYS.items()
    }
    found = turns.take_turns(ways, repeats, is_ordered=True)
    rows: list[Sequence[str]] = [
        ("", "training again", "all ranks again", "steps done again", "weights differ by")
    ]
    for name, figures in found.items():
        columns = [turns.column(figures, key) for key in ("again", "all", "repeated")]
        cells = [
            turns.cell(columns[0], "{:.2f} s".format),
            turns.cell(columns[1], "{:.2f} s".format),
        ]
        cells += [turns.cell(columns[2], "{:.0f}".format)]
        cells += [f"{max(turns.column(figures, 'gap')):.1g}"]
        rows.append((name, *cells))
    turns.show(f"{hosts * ranks} ranks on {hosts} hosts, medians of {repeats}", rows)


def _words(words: Sequence[str]) -> list[str]:
    return [f"train.steps={STEPS}", *words]


def _lose(
    root: Path,
    hosts: int,
    ranks: int,
    name: str,
    words: Sequence[str],
    plain: dict[str, torch.Tensor],
    turn: int,
) -> turns.Figures:
    """Kill the last rank of a run; return the figures."""
    title = f"{[*WAYS].index(name)}-{turn}"
    with lost_ranks.submitted(root, title, hosts, ranks, *_words(words)) as (run, problem):
        lost_ranks.await_step(run, KILLED_AFTER)
        when = lost_ranks.kill(run, hosts * ranks - 1)
        lost_ranks.await_ranks(run, hosts * ranks, when)
        assert not problem(), problem()
    all_again = lost_ranks.await_ranks(run, hosts * ranks, when)
    first = [e["time"] for e in run.read_events("first_step") if e["time"] > when]
    lines = [*run.read_metrics(), *ForgottenStep.read(run.path)]
    reached = max(line.step for line in lines if line.time < when)
    resumed = next(e["step"] for e in run.read_events("resumed") if e["time"] > when)
    return {
        "again": min(first) - when,
        "all": all_again - when,
        "repeated": float(max(0, reached - resumed)),
        "gap": lost_ranks.gap(lost_ranks.weights(run, STEPS), plain),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
