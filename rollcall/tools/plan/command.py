"""`rollcall plan`: show what a run would need and take, before it is submitted.

rollcall plan llama-3-8b --gpus 64 --gpu h100     # a known shape: no weights, no torch
rollcall plan gpt model.num_layers=24 --gpus 8 --gpu a100
rollcall plan my-run --gpu a100                   # predicted beside measured
rollcall plan digits --ranks 512 --node-size 8    # what each rank would hold and send
rollcall plan --validate FOLDER                   # the planner's errors on measured tables
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from rollcall.cli.parser import parser as command_parser
from rollcall.config import Config, ConfigError, parse
from rollcall.messages.refusal import RefusedError, refuse
from rollcall.messages.text import did_you_mean, duration, size
from rollcall.records.run import LoggedStep, read_events
from rollcall.records.run_dir import named as run_named
from rollcall.tools.plan import memory, report, run_cost, search, step_time, validate
from rollcall.tools.plan.layout import Layout
from rollcall.tools.plan.machine import Machine, Machines
from rollcall.tools.plan.model import Model, named, shapes

MOST = 10**9
"""Largest number that an option takes; nothing that a plan counts is larger."""
MOST_RANKS = 2**16
"""Ranks of the largest world that `--ranks` imagines."""
CHOSEN = {
    "parallel.strategy": "mesh",
    "parallel.mesh": "mesh",
    "parallel.sequence_parallel": "sequence",
    "data.micro_batch": "micro",
    "model.activation_checkpointing": "recompute",
}
"""Keys that a plan chooses unless its command has them, with what they are of a layout."""
TOKENS = 4 * 2**20
"""Tokens of a step for a known shape without `--batch`; Llama 3 began with 4M."""


def main(words: Sequence[str]) -> int:
    """Print the plan; return the exit code."""
    try:
        options = _parser().parse_intermixed_args(words)
        _check(options)
        machines = Machines(options.machines)
        if options.validate is not None:
            _only(options, "--validate", "validate", "json")
            validate.show(options.validate, machines, options.json)
        elif options.ranks:
            print(_ranks(options, ""))
        else:
            print(_plan(options, machines))
    except RefusedError as error:
        return refuse(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("plan", __doc__)
    add = parser.add_argument

    def add_count(option: str, metavar: str, meaning: str) -> None:
        add(option, type=partial(_count, option), metavar=metavar, help=meaning)

    add_count("--gpus", "N", "number of GPUs")
    add_count("--nodes", "N", "number of nodes, instead of --gpus")
    add("--gpu", metavar="CHIP", help="chip, such as h100; rollcall/config/chips.yaml lists all")
    add_count("--node-size", "K", "GPUs or ranks on each node")
    add("--fabric", metavar="NAME", help="network between the nodes (default: infiniband)")
    add_count("--batch", "N", "samples in a step of a known shape")
    add_count("--length", "N", "tokens of a sample of a known shape")
    add("--precision", metavar="FORMAT", help="number format (default: bf16, or the recipe's)")
    add_count("--top", "N", "layouts to show (default: 5)")
    add("--why", action="store_true", help="show the terms of the best layout")
    add("--budget", metavar="N", help="tokens or samples to train on, such as 15T")
    add("--price", type=_price, metavar="P", help="price of a GPU-hour, for --budget")
    meaning = "failures per node and day, or the name of a published rate (default: rsc-1)"
    add("--failures", metavar="RATE", help=meaning)
    add("--machines", metavar="FILE", help="chips, fabrics, software and factors of your own")
    add("--validate", metavar="FOLDER", help="compare with the tables of a folder")
    add("--json", action="store_true", help="print JSON")
    add_count("--ranks", "N", "show what each of N ranks would hold")
    add("words", nargs="*", metavar="[shape or recipe or run] [key=value ...]")
    return parser


def _count(option: str, word: str) -> int:
    if word.isdecimal() and 1 <= int(word) <= MOST:
        return int(word)
    raise RefusedError(f"{option} {word}: expected a whole number from 1 to {MOST:,}")


def _price(word: str) -> float:
    with suppress(ValueError):
        if 0 < (price := float(word)) < math.inf:
            return price
    raise RefusedError(f"--price {word}: expected the price of a GPU-hour, a number above 0")


def _check(options: argparse.Namespace) -> None:
    if options.budget is None and (options.price or options.failures):
        raise RefusedError("--price and --failures need --budget, such as --budget 15T")
    if options.gpus and options.nodes:
        raise RefusedError("--gpus and --nodes say the same; give one of them")
    if options.ranks and options.ranks > MOST_RANKS:
        raise RefusedError(f"--ranks {options.ranks}: expected at most {MOST_RANKS:,}")


def _only(options: argparse.Namespace, what: str, *known: str) -> None:
    """Refuse options that would be ignored."""
    for name, value in vars(options).items():
        if value and name not in ("words", "machines", *known):
            raise RefusedError(f"{what} takes no --{name.replace('_', '-')}")


def _ranks(options: argparse.Namespace, first: str) -> str:
    what = "--ranks" if options.ranks else "a plan without --gpu"
    _only(options, what, "ranks", "node_size")
    ranks = options.ranks or 1
    node_size = options.node_size or ranks
    if ranks % node_size:
        raise RefusedError(f"--ranks {ranks} is not a multiple of --node-size {node_size}")
    recipe, config = _parse(options.words, first)
    from rollcall.tools.plan import ranks as plan_ranks  # late: it imports torch

    return f"{recipe}: {plan_ranks.describe(config, ranks, node_size)}"


def _plan(options: argparse.Namespace, machines: Machines) -> str:
    first = next((word for word in options.words if "=" not in word), "")
    directory = run_named(first, "config.yaml") if first else None
    if not options.gpu:
        if directory or first in shapes() or options.gpus or options.nodes:
            raise RefusedError("expected --gpu with the name of a chip, such as --gpu h100")
        return _ranks(options, first)
    if directory:
        return _beside_measured(directory, options, machines)
    keys: list[str] = []
    asked: dict[str, object] = {}
    if first in shapes():
        precision = options.precision or "bf16"
        model = named(first, options.length)
        if len(options.words) > 1:
            raise RefusedError(f"{first} is a known shape and takes no keys: {options.words[1]}")
        batch = options.batch or max(1, TOKENS // model.length)
        first = "RECIPE"
    else:
        if options.length:
            raise RefusedError("--length is for a known shape; a recipe has data.seq_len")
        keys = [word for word in options.words if "=" in word]
        _, config = _parse(options.words, first)
        is_chosen = any(word.startswith("precision=") for word in keys)
        default = config.precision if is_chosen or config.precision != "fp32" else "bf16"
        precision = options.precision or default
        batch = options.batch or config.data.global_batch
        from rollcall.tools.plan import own_model as plan_model  # late: it imports torch

        model = plan_model.describe(config)
    machine = machines.machine(
        options.gpu, "rollcall", precision, options.node_size, options.fabric
    )
    gpus = options.gpus or (options.nodes or 1) * machine.host
    if given := {word: CHOSEN[key] for word in keys if (key := word.partition("=")[0]) in CHOSEN}:
        meant = _layout(config, gpus, machine)
        asked = {name: getattr(meant, name) for name in given.values()}
        if not isinstance(config.data.micro_batch, int):
            asked.pop("micro", None)  # the plan finds it out, too
    choices = search.search(model, gpus, batch, machine, precision, **asked)
    if not choices and asked:
        raise RefusedError(
            f"{' '.join(given)}: none of the layouts that a plan tries has this and fits on {gpus} "
            f"{machine.chip.name}; remove it to see what does (docs/plan.md)"
        )
    if not choices:
        raise RefusedError(_nothing_fits(model, machine, gpus, batch, precision))
    best, nodes, cost = choices[0], math.ceil(gpus / machine.host), None
    if options.budget is not None:
        amount = run_cost.budget(options.budget)
        failures = run_cost.rate(options.failures or "rsc-1")
        cost = run_cost.cost(model, best.time, batch, amount, nodes, failures)
    shown = choices[: options.top or 5]
    if options.json:
        return report.as_json(shown, model, machine, cost)
    planned = {word.partition("=")[0] for word in best.words()}
    keys = [word for word in keys if word.partition("=")[0] not in planned]
    words = [f"--nodes {nodes}", f"--gpus-per-node {min(gpus, machine.host)}", first, *keys]
    lines = [
        report.headline(model, machine, gpus, batch, precision),
        "",
        *report.choices(shown, model, machine),
        "",
        f"Submit the first: rollcall submit {' '.join([*filter(None, words), *best.words()])}",
    ]
    if fewest := search.smallest(model, gpus, machine, precision):
        lines.append(
            f"The fewest GPUs that it fits on: {fewest.layout.ranks}, with {fewest.words()[0]}, "
            f"recompute {fewest.layout.recompute}."
        )
    if not asked and (changes := search.levers(model, best, machine, machines, precision)):
        listed = ", ".join(f"{name} ×{speed:.2f}" for name, speed in changes)
        lines.append(f"For more speed: {listed}.")
    lines += ["", *report.run(cost, gpus, options.price)] if cost else []
    lines += ["", *report.why(best, model, machine)] if options.why else []
    return "\n".join(lines)


def _parse(words: Sequence[str], first: str) -> tuple[str, Config]:
    try:
        return parse(words)
    except ConfigError as error:
        hint = did_you_mean(first, shapes()) if first and "recipe" in str(error) else ""
        raise ConfigError(f"unknown model '{first}'{hint}" if hint else error) from None


def _nothing_fits(model: Model, machine: Machine, gpus: int, batch: int, precision: str) -> str:
    tried = search.layouts(model, gpus, batch, machine, precision)
    needs = [memory.of(model, layout, machine).total() for layout in tried]
    if not needs:
        return f"no mesh divides a batch of {batch} samples over {gpus} GPUs; raise the batch"
    return (
        f"{model.name} does not fit on {gpus} {machine.chip.name}: the leanest layout needs "
        f"{size(min(needs))} of the {size(machine.chip.memory * memory.USABLE)} that a GPU has for "
        "it; use more GPUs or a chip with more memory"
    )


def _layout(config: Config, ranks: int, machine: Machine) -> Layout:
    """Return the layout of a run."""
    degrees = config.parallel.degrees(ranks, min(ranks, machine.node))
    shard = degrees.get("shard", 1)
    data = degrees.get("replicate", 1) * shard
    batch, micro = config.data.global_batch, config.data.micro_batch
    return Layout(
        data=data,
        tensor=degrees.get("tensor", 1),
        stages=degrees.get("pipeline", 1),
        context=degrees.get("context", 1),
        zero=config.parallel.stage if shard > 1 else 0,
        shard=shard if degrees.get("replicate", 1) > 1 else 0,
        micro=micro if isinstance(micro, int) else -(-batch // data),
        batch=batch,
        sequence=config.parallel.sequence_parallel,
        precision=config.precision,
        recompute="full" if config.model.activation_checkpointing == "blocks" else "none",
    )


def _beside_measured(directory: Path, options: argparse.Namespace, machines: Machines) -> str:
    """Compare a run's step with its plan, term by term; return the factor between them."""
    _only(options, "the plan of a run", "gpu", "node_size", "fabric", "json")
    if len(options.words) > 1:
        raise RefusedError(f"the plan of a run takes no keys: {options.words[1]}")
    config = parse([str(directory / "config.yaml")])[1]
    started = (read_events(directory, "started") or [{"time": 0.0}])[-1]
    ranks = int(started.get("world_size", 1))
    precision, node = config.precision, options.node_size
    machine = machines.machine(options.gpu, "rollcall", precision, node, options.fabric)
    chip = str(started.get("chip", "a chip that it did not record"))
    if not machines.is_named(machine.chip, chip):
        raise RefusedError(
            f"--gpu {options.gpu}: {directory.name} ran on {chip}, so its times say nothing about "
            f"{machine.chip.name}; expected a run on this chip"
        )
    steps = [line for line in LoggedStep.read(directory) if line.time >= started["time"]]
    late = steps[len(steps) // 2 :]  # of the newest attempt: an older one may have had other ranks
    if not late:
        raise RefusedError(f"{directory}: no step has been logged, so there is nothing to compare")
    rate = statistics.median(line.samples_per_second for line in late)
    measured = config.data.global_batch / rate
    waits = statistics.median(line.data_wait for line in late)
    layout = _layout(config, ranks, machine)
    from rollcall.tools.plan import own_model as plan_model  # late: it imports torch

    model = plan_model.describe(config)
    seconds = step_time.of(model, layout, machine)
    factor = measured / seconds.total() * machine.factor
    key = f"{machine.chip.name} {precision} rollcall"
    if options.json:
        values = {"measured": measured, "predicted": seconds.total(), "terms": dict(seconds)}
        return json.dumps({**values, "factor": {key: round(factor, 3)}}, indent=2)
    best = search.Choice(layout, seconds, memory.of(model, layout, machine))
    return "\n".join(
        [
            f"{directory.name}: a step took {duration(measured)}, of which "
            f"{duration(measured * waits)} waiting for data; the plan says "
            f"{duration(seconds.total())} on {ranks} {machine.chip.name}.",
            *report.why(best, model, machine),
            f"Measured beyond the plan: {duration(abs(measured - seconds.total()))} "
            f"{'more' if measured > seconds.total() else 'less'}. To plan with it, write "
            f'`factors: {{"{key}": {factor:.3f}}}` to a file and name it with --machines.',
        ]
    )
