"""`python -m rollcall.bench step`: what a step costs, beside a bare loop and other frameworks.

All loops train the same model on the same digits, in turns, so that other load affects all of them.
Frameworks that are not installed are left out.
"""

import importlib.util
import json
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rollcall.bench import loops, turns


def main(argv: Sequence[str]) -> int:
    """Measure and print the table; return the exit code."""
    words = turns.parser("step", __doc__)
    words.add_argument("--nproc-per-node", type=int, default=1, metavar="K", help="ranks")
    words.add_argument("--model", choices=loops.MODELS, default="mlp", help="model to train")
    words.add_argument("--steps", type=int, default=1000, help="steps that are timed")
    words.add_argument(
        "--pieces", action="store_true", help="show what rollcall's step consists of"
    )
    options = words.parse_args(argv)
    ranks, repeats = options.nproc_per_node, options.repeats

    def measure(name: str, _: int) -> turns.Figures:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            settings = loops.Settings(options.model, options.steps, options.pieces, place)
            turns.on_ranks(partial(loops.run, name, settings), place, ranks)
            found: list[turns.Figures] = [
                json.loads(file.read_text()) for file in place.glob("rank-*")
            ]
        return {key: statistics.fmean(each[key] for each in found) for key in found[0]}

    names = [
        name for name, (_, package) in loops.LOOPS.items() if importlib.util.find_spec(package)
    ]
    names = ["rollcall"] if options.pieces else names
    found = turns.medians(
        turns.take_turns({name: partial(measure, name) for name in names}, repeats)
    )
    title = f"one step, {options.model}, ranks: {ranks}, medians of {repeats} runs, in turns"
    if options.pieces:
        own = sorted(found["rollcall"].items(), key=lambda piece: -piece[1])
        turns.show(
            title, [("piece", "per step"), *((name, turns.seconds(taken)) for name, taken in own)]
        )
    else:
        turns.compare(title, found, "bare")
    return 0
