"""`python -m rollcall.bench step`: what a step costs, beside a bare loop and other frameworks.

All loops train the same model on the same digits, in turns, so that other load affects all of them.
Frameworks that are not installed are left out.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rollcall.bench.loops import LOOPS, MODELS
from rollcall.installation import ROOT
from rollcall.text import table


class LoopError(Exception):
    """A loop ended without a result."""


Figures = dict[str, float]
"""Seconds per step: `wall`, `cpu`, and for each piece that was asked for."""


def main(argv: Sequence[str]) -> int:
    """Measure and print the table; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rollcall.bench step",
        description="Measure what a step costs, beside a bare loop and other frameworks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="K", help="ranks")
    parser.add_argument("--model", choices=MODELS, default="mlp", help="model to train")
    parser.add_argument("--steps", type=int, default=1000, help="steps that are timed")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each loop")
    parser.add_argument(
        "--pieces", action="store_true", help="show what rollcall's step consists of"
    )
    options = parser.parse_args(argv)
    names = [name for name, (_, package) in LOOPS.items() if importlib.util.find_spec(package)]
    if options.pieces:
        names = ["rollcall"]
    found: dict[str, list[Figures]] = {name: [] for name in names}
    try:
        for _ in range(options.repeats):
            for name in names:
                found[name].append(_measure(name, options))
    except LoopError as error:
        print(f"step: error: {error}", file=sys.stderr)
        return 1
    ranks = f"{options.nproc_per_node} rank{'s' * (options.nproc_per_node > 1)}"
    print(f"one step, {options.model}, {ranks}, medians of {options.repeats} runs, in turns")
    medians = {name: _medians(figures) for name, figures in found.items()}
    print("\n".join(table(_pieces(medians["rollcall"]) if options.pieces else _rows(medians))))
    return 0


def _measure(name: str, options: argparse.Namespace) -> Figures:
    """Run one loop on new processes; return rank 0's figures, with CPU time of all ranks' mean."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "BENCH_MODEL": options.model,
            "BENCH_STEPS": str(options.steps),
            "BENCH_RESULT": str(result),
            **({"BENCH_PIECES": "1"} if options.pieces else {}),
        }
        ranks = options.nproc_per_node
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        words = [*(launcher if ranks > 1 else []), "-m", "rollcall.bench.loops", name]
        answer = subprocess.run(
            [sys.executable, *words],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        files = sorted(Path(folder).glob("result.*"))
        if len(files) != ranks:
            raise LoopError(f"{name} ended with exit code {answer.returncode}:\n{answer.stdout}")
        figures: list[Figures] = [json.loads(file.read_text()) for file in files]
        return {**figures[0], "cpu": statistics.fmean(each["cpu"] for each in figures)}


def _medians(figures: Sequence[Figures]) -> Figures:
    return {name: statistics.median(each[name] for each in figures) for name in figures[0]}


def _rows(medians: dict[str, Figures]) -> list[tuple[str, ...]]:
    bare = medians["bare"]
    rows: list[tuple[str, ...]] = [("", "wall", "/ bare", "CPU of a rank", "/ bare")]
    for name, own in medians.items():
        cells = [
            text
            for key in ("wall", "cpu")
            for text in (f"{1000 * own[key]:.2f} ms", f"{own[key] / bare[key]:.2f}")
        ]
        rows.append((name, *cells))
    return rows


def _pieces(own: Figures) -> list[tuple[str, ...]]:
    order = sorted(own, key=own.__getitem__, reverse=True)
    return [("piece", "per step"), *((name, f"{1e6 * own[name]:.0f} µs") for name in order)]
