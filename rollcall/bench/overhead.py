"""`rollcall bench overhead`: what a step costs, beside a bare loop and other frameworks.

All loops train the same models on the same digits, in turns, so that other load affects all of
them. Frameworks that are not installed are left out. A rank has one thread.
"""

import importlib.util
from collections.abc import Sequence
from functools import partial

from rollcall.bench import loops, turns


def main(argv: Sequence[str]) -> int:
    """Measure and print the tables; return the exit code."""
    words = turns.parser("overhead", __doc__)
    words.add_argument("--nproc-per-node", type=turns.count, default=1, metavar="K", help="ranks")
    words.add_argument(
        "--model", choices=loops.MODELS, nargs="*", default=[*loops.MODELS], help="default: all"
    )
    words.add_argument("--steps", type=turns.count, default=400, help="steps that are timed")
    words.add_argument(
        "--pieces", action="store_true", help="show what rollcall's step consists of"
    )
    options = words.parse_args(argv)
    ranks = options.nproc_per_node
    needed = {name: package for name, (_, package) in loops.LOOPS.items() if package}
    names = [name for name, package in needed.items() if importlib.util.find_spec(package)]
    for model in options.model:
        settings = loops.Settings(model, options.steps, options.pieces)
        chosen = ["rollcall"] if options.pieces else names
        ways = {name: partial(loops.measure, name, settings, ranks) for name in chosen}
        found = turns.take_turns(ways, options.repeats)
        title = f"one step, {model}, ranks: {ranks}, medians of {options.repeats} runs, in turns"
        if options.pieces:
            medians = turns.medians(found)["rollcall"]
            own = sorted(medians, key=lambda piece: -medians[piece])
            taken = [turns.cell(turns.column(found["rollcall"], one), turns.seconds) for one in own]
            turns.show(title, [("piece", "per step"), *zip(own, taken, strict=True)])
        else:
            turns.compare(title, found, "bare")
        print()
    return 0
