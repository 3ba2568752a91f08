"""`rollcall bench batch`: which micro-batches fit into memory, and how fast each is.

The ranks build the parts of a run and compute gradients of more and more samples; nothing is
trained. Sizes grow by doubling, then by halves. Every rank tries the same sizes, and the rank that
takes most memory or time counts. `data.micro_batch=auto` does the same before the first step.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rollcall.config import ConfigError, parse
from rollcall.messages.text import size
from rollcall.records.run_dir import RunDir
from rollcall.tools.bench import turns

UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def main(argv: Sequence[str]) -> int:
    """Measure and print the table; return the exit code."""
    parser = turns.parser("batch", __doc__, repeats=3)
    parser.add_argument("--nproc-per-node", type=turns.count, default=1, metavar="K", help="ranks")
    limit = "memory that a rank may use, such as 2GB (default: what is free, less a tenth)"
    parser.add_argument("--memory", type=_bytes, metavar="SIZE", help=limit)
    parser.add_argument("words", nargs="*", help="recipe and keys (default: digits)")
    options = parser.parse_intermixed_args(argv)
    words, ranks = options.words or ["digits"], options.nproc_per_node
    try:
        batch = parse([*words, "data.micro_batch=auto"])[1].data.global_batch
    except ConfigError as error:
        raise turns.BenchError(str(error)) from None
    if ranks > batch:
        raise turns.BenchError(f"{ranks} ranks: data.global_batch={batch} has fewer samples")
    found: list[dict[str, turns.Figures]] = []

    def measure(_: int) -> turns.Figures:
        with tempfile.TemporaryDirectory() as folder:
            work = partial(_rank, words, Path(folder), options.memory)
            turns.on_ranks(work, Path(folder), ranks)
            found.append(json.loads((Path(folder) / "found").read_text()))
        return found[-1]["fit"]

    fit = turns.take_turns({"search": measure}, options.repeats)["search"]
    rows: list[Sequence[str]] = [("samples at once", "peak of a rank", "samples/s of a rank")]
    for number in sorted({name for each in found for name in each if name != "fit"}, key=int):
        each = [one[number] for one in found if number in one]
        rates = turns.cell(turns.column(each, "rate"), "{:,.0f}".format)
        rows.append((number, turns.cell(turns.column(each, "peak"), size), rates))
    turns.show(f"micro-batches of {' '.join(words)}, ranks: {ranks}", rows)
    print(f"limit of a rank    {turns.cell(turns.column(fit, 'limit'), size)}")
    for name in ("largest", "fastest"):
        print(f"{name} that fits  {turns.cell(turns.column(fit, name), '{:.0f}'.format)}")
    if max(turns.column(fit, "largest")) >= batch // ranks:
        print(f"A rank has only {batch // ranks} samples: raise data.global_batch for more.")
    return 0


def _bytes(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMGT]?)B?", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"expected a size such as 500MB or 2GB, not '{text}'")
    return float(match[1]) * UNITS[match[2]]


def _rank(words: Sequence[str], folder: Path, limit: float | None) -> None:
    from rollcall.train import training  # here: --help needs no torch
    from rollcall.train.ranks.run import Run
    from rollcall.train.ranks.signals import StopSignals
    from rollcall.train.ranks.world import World

    config = parse(words)[1]
    world = World.join(config.device)
    with StopSignals() as signals:
        run = Run(config, world, RunDir(folder, "batch"))
        found = training.try_micro_batches(run, signals, limit)
    if world.is_main:
        sizes = [one.size if one else 0 for one in (found.largest, found.fastest)]
        fit = dict(zip(("limit", "largest", "fastest"), (found.limit, *sizes), strict=True))
        result = {str(one.size): {"peak": one.peak, "rate": one.rate} for one in found.fitting}
        (folder / "found").write_text(json.dumps({**result, "fit": fit}))
    world.leave()
