"""`rollcall bench overhead`: what a step costs, beside a bare loop and other frameworks.

All loops take turns to train the same models on the same digits, with fused AdamW and batches by
index from memory. Frameworks that are not installed are left out. A rank has one thread.
"""

import importlib.util
import tempfile
from collections.abc import Sequence
from functools import partial

from rollcall.cli.installation import TRAIN
from rollcall.messages.text import duration
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.tools.bench import loops, turns

BATCH = 16
"""Samples of a step of the recipe gpt."""


def main(argv: Sequence[str]) -> int:
    """Measure and print the tables; return the exit code."""
    words = turns.parser("overhead", __doc__)
    add = words.add_argument
    add("--nproc-per-node", type=turns.count, default=1, metavar="K", help="ranks")
    add("--model", choices=loops.MODELS, nargs="*", default=[*loops.MODELS], help="default: all")
    add("--steps", type=turns.count, default=400, help="steps that are timed")
    meaning = "compare loops with a DataLoader instead, beside the bare loop without one"
    add("--data-loader", action="store_true", help=meaning)
    meaning = "zero3: beside a loop with FSDP2 written by hand (default: ddp)"
    add("--strategy", choices=("ddp", "zero3"), default="ddp", help=meaning)
    meaning = "show what the check before the first step costs the recipe gpt instead, in its steps"
    add("--first", action="store_true", help=meaning)
    options = words.parse_args(argv)
    if options.first:
        runs = {name: partial(_check, name) for name in ("ddp", "zero3", "tensor")}
        rows = [("", "step", "check", "check in steps")]
        for name, measured in turns.take_turns(runs, options.repeats).items():
            step, check = (turns.column(measured, key) for key in ("step", "check"))
            taken = [turns.cell(times, duration) for times in (step, check)]
            rows.append((name, taken[0], taken[1], turns.cell(turns.ratios(check, step))))
        turns.show(f"gpt, 2 ranks, medians of {options.repeats} runs, in turns", rows)
        return 0
    ranks, is_sharded = options.nproc_per_node, options.strategy == "zero3"
    if is_sharded and ranks < 2:
        raise turns.BenchError("--strategy zero3 needs --nproc-per-node 2 or more")
    needed = {name: package for name, (_, package) in loops.LOOPS.items() if package}
    names = [name for name, package in needed.items() if importlib.util.find_spec(package)]
    loading = [name for name in names if name.endswith(", DataLoader")]
    names = ["bare", *loading] if options.data_loader else [n for n in names if n not in loading]
    for model in options.model:
        settings = loops.Settings(model, options.steps, strategy=options.strategy)
        chosen = ["FSDP2", "rollcall"] if is_sharded else names
        ways = {name: partial(loops.measure, name, settings, ranks) for name in chosen}
        found = turns.take_turns(ways, options.repeats)
        title = f"one step, {model}, ranks: {ranks}, medians of {options.repeats} runs, in turns"
        turns.compare(title, found, chosen[0])
        print()
    return 0


def _check(strategy: str, _: int) -> turns.Figures:
    """Return the seconds of a step and of the check, from the records of a run."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(folder, "run")
        keys = f"data.global_batch={BATCH}", "train.steps=12", "train.evaluate_every=null"
        words = "gpt", f"parallel.strategy={strategy}", "device=cpu", *keys, *run.words
        turns.timed([*turns.torchrun(*TRAIN, ranks=2), *words])
        rates = [line.get("samples_per_second") for line in read_lines(run.metrics)]
        [event] = run.read_events("spread_checked")
    return {"step": BATCH / [*filter(None, rates)][-1], "check": event["seconds"]}
