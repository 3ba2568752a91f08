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
import re
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rollcall.cli.parser import parser as command_parser
from rollcall.config import Config, ConfigError, parse
from rollcall.config.checks import LOOPED
from rollcall.messages.refusal import RefusedError, refuse
from rollcall.messages.text import duration, size
from rollcall.records.run import LoggedStep, read_events
from rollcall.records.run_dir import named as run_named
from rollcall.tools.plan import memory, report, run_cost, search, shapes, step_time, validate
from rollcall.tools.plan.layout import Layout
from rollcall.tools.plan.machine import Machine, Machines
from rollcall.tools.plan.margins import margin
from rollcall.tools.plan.model import Model

MOST, MOST_RANKS = 10**9, 2**16
"""Largest number that an option takes, and that `--ranks` does."""
CHOSEN = {
    "parallel.strategy": "mesh",
    "parallel.mesh": "mesh",
    "parallel.sequence_parallel": "sequence",
    "parallel.schedule": "schedule",
    "parallel.stages_per_rank": "schedule",
    "parallel.reduce_scatter": "scattered",
    "data.micro_batch": "micro",
    "model.activation_checkpointing": "recompute",
}
"""Keys that a plan chooses unless its command has them, with what they are of a layout."""
RECOMPUTE = {"blocks": "full", "selective": "selective"}
NOT_OF_SHAPE = re.compile(r"(?!model\.activation_checkpointing$)model\.|data\.name$")
"""Keys of the model and the data, which a shape replaces."""
IMBALANCE = 1.1
"""Tokens of the fullest rank of experts, relative to the mean, unless measured. Assumed."""
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

    def add_number(
        option: str, metavar: str, text: str, least: float = 1, most: int = MOST
    ) -> None:
        add(option, type=partial(_number, option, least, most), metavar=metavar, help=text)

    add_number("--gpus", "N", "number of GPUs")
    add_number("--nodes", "N", "number of nodes, instead of --gpus")
    add("--gpu", metavar="CHIP", help="chip, such as h100; rollcall/config/chips.yaml lists all")
    add_number("--node-size", "K", "GPUs or ranks on each node")
    add("--fabric", metavar="NAME", help="network between the nodes (default: infiniband)")
    add_number("--batch", "N", "samples in a step of a known shape")
    add_number("--length", "N", "tokens of a sample of a known shape")
    add("--shape", metavar="PATH", help="config.json of a Hugging Face model, or its folder")
    add("--program", metavar="NAME", help="whose efficiency is assumed (default: rollcall)")
    add_number("--imbalance", "X", "fullest over mean tokens of experts", 1.0)
    add("--precision", metavar="FORMAT", help="number format (default: bf16, or the recipe's)")
    add_number("--top", "N", "layouts to show (default: 5)")
    add("--why", action="store_true", help="show the terms of the best layout")
    add("--budget", metavar="N", help="tokens or samples to train on, such as 15T")
    add_number("--price", "P", "price of a GPU-hour, for --budget", 0.01)
    add_number("--failures", "RATE", "failures per node and day (default: 0.0065)", 0.0)
    add("--machines", metavar="FILE", help="chips, fabrics and software of your own")
    add("--calibrate", metavar="RUN", help="a run, or measured over planned time as a number")
    add("--validate", metavar="FOLDER", help="compare with the tables of a folder")
    add("--json", action="store_true", help="print JSON")
    add_number("--ranks", "N", "show what each of N ranks would hold", 1, MOST_RANKS)
    add("words", nargs="*", metavar="[shape or recipe or run] [key=value ...]")
    return parser


def _number(option: str, least: float, most: float, word: str) -> float:
    """Read a number of the type of `least`."""
    with suppress(ValueError):
        if (word[:1] != "+" and "_" not in word) and least <= (number := type(least)(word)) <= most:
            return number
    what = "a whole number" if type(least) is int else "a number"
    raise RefusedError(f"{option} {word}: expected {what} from {least:g} to {most:,}")


def _check(options: argparse.Namespace) -> None:
    if options.budget is None and (options.price or options.failures):
        raise RefusedError("--price and --failures need --budget, such as --budget 15T")
    if options.gpus and options.nodes:
        raise RefusedError("--gpus and --nodes say the same; give one of them")


def _only(options: argparse.Namespace, what: str, *known: str) -> None:
    """Refuse options that would be ignored."""
    for name, value in vars(options).items():
        if value and name not in ("words", "machines", *known):
            raise RefusedError(f"{what} takes no --{name.replace('_', '-')}")


def _ranks(options: argparse.Namespace, first: str) -> str:
    _only(options, "--ranks" if options.ranks else "a plan without --gpu", "ranks", "node_size")
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
        if directory or shapes.find(first) or options.shape or options.gpus or options.nodes:
            raise RefusedError("expected --gpu with the name of a chip, such as --gpu h100")
        return _ranks(options, first)
    if directory:
        return _beside_measured(directory, options, machines)
    machines.chip(options.gpu)  # a wrong name is known before torch is imported
    keys = [word for word in options.words if "=" in word]
    name, model, config = _model(first, keys, options)
    for key in ("sync", "cpu_offload", "compression"):
        if getattr(config.parallel, key) != type(config.parallel).model_fields[key].default:
            raise RefusedError(f"parallel.{key} is not planned; remove it")
    batch, precision = config.data.global_batch, config.precision
    machines.check(program := options.program or _ours(config))
    machine = machines.machine(options.gpu, program, precision, options.node_size, options.fabric)
    machine = replace(machine, factor=_factor(options, machines))
    gpus = options.gpus or (options.nodes or 1) * machine.host
    given = {word: CHOSEN[key] for word in keys if (key := word.partition("=")[0]) in CHOSEN}
    asked = _layout(config, gpus, machine) if given else Layout(batch=batch, precision=precision)
    sequence = asked.sequence or "sequence" not in given.values()
    asked = replace(asked, sequence=sequence, imbalance=options.imbalance or IMBALANCE)
    fixed = {*given.values()} - ({"micro"} if config.data.micro_batch == "auto" else set())
    choices = search.search(model, gpus, machine, asked, *fixed)
    if not choices:
        what = f"{' '.join(given)}: " if given else ""
        raise RefusedError(what + _nothing_fits(model, machine, gpus, asked, *fixed))
    best, nodes, cost = choices[0], math.ceil(gpus / machine.host), None
    if options.budget is not None:
        rate = run_cost.FAILURES if options.failures is None else options.failures
        cost = run_cost.cost(model, best.time, batch, run_cost.budget(options.budget), nodes, rate)
    shown = choices[: options.top or 5]
    if options.json:
        return report.as_json(shown, model, machine, cost)
    planned = {word.partition("=")[0] for word in best.words()}
    keys = [word for word in keys if word.partition("=")[0] not in planned]
    words = [f"--nodes {nodes}", f"--gpus-per-node {min(gpus, machine.host)}", name, *keys]
    lines = [
        report.headline(model, machine, gpus, batch, precision),
        "",
        *report.choices(shown, model, machine),
        "",
        margin(model, best.layout, machine).text(),
        f"Submit the first: rollcall submit {' '.join([*filter(None, words), *best.words()])}",
    ]
    if published := shapes.KNOWN.get(model.name, {}).get("published"):
        lines.append(f"Published, per GPU: {published}")
    if fewest := search.smallest(model, gpus, machine, asked):
        lines.append(
            f"The fewest GPUs that it fits on: {fewest.layout.ranks}, with {fewest.words()[0]}, "
            f"recompute {fewest.layout.recompute}."
        )
    lines += ["", *report.run(cost, gpus, options.price)] if cost else []
    lines += ["", *report.why(best, machine)] if options.why else []
    return "\n".join(lines)


def _model(first: str, keys: list[str], options: argparse.Namespace) -> tuple[str, Model, Config]:
    """Return the word to submit, the model, and the configuration of the keys."""
    shape = shapes.find(first)
    if not (options.shape or shape):
        if options.length or options.batch:
            raise RefusedError("--length and --batch are for a shape; a recipe has keys for them")
        _, config = _parse(options.words, first)
        is_chosen = any(word.startswith("precision=") for word in keys)
        if options.precision or (config.precision == "fp32" and not is_chosen):
            config = config.model_copy(update={"precision": options.precision or "bf16"})
        from rollcall.tools.plan import own_model as plan_model  # late: it imports torch

        return first, plan_model.describe(config), config
    if options.shape and first:
        raise RefusedError(f"--shape {options.shape} is the model; remove {first}")
    given = dict(word.split("=", 1) for word in keys)
    if other := next(filter(NOT_OF_SHAPE.match, given), ""):
        raise RefusedError(f"{other}: {first or options.shape} is the model; remove the key")
    read, name = (shapes.from_file, options.shape) if options.shape else (shapes.named, first)
    if (key := "data.seq_len") in given:
        options.length = options.length or _number(key, 1, MOST, given[key])
    model = read(name, options.length)
    words = [f"data.global_batch={max(1, TOKENS // model.length)}", "precision=bf16", *keys]
    words += [f"data.global_batch={options.batch}"] if options.batch else []
    words += [f"precision={options.precision}"] if options.precision else []
    return "RECIPE", model, parse(["gpt", *words])[1]


def _parse(words: Sequence[str], first: str) -> tuple[str, Config]:
    try:
        return parse(words)
    except ConfigError as error:
        hint = shapes.near(first) if first and "recipe" in str(error) else ""
        raise ConfigError(f"unknown model '{first}'{hint}" if hint else error) from None


def _nothing_fits(model: Model, machine: Machine, gpus: int, asked: Layout, *fixed: str) -> str:
    """Return which rule no layout keeps: of memory, divisibility or batch, and by how much."""
    needs = [need.total() for _, need in search.layouts(model, gpus, machine, asked, *fixed)]
    if not needs:
        if "mesh" in fixed and (rule := search.problem(model, asked)):
            return rule
        hint = ""
        for larger in (replace(asked, batch=asked.batch * 2**power) for power in range(1, 8)):
            if not hint and any(search.layouts(model, gpus, machine, larger, *fixed)):
                hint = f"; {larger.batch:,} would be enough"
        return f"no mesh divides a batch of {asked.batch} samples over {gpus} GPUs{hint}"
    has = machine.chip.memory * memory.USABLE
    return (
        f"{model.name} does not fit on {gpus} {machine.chip.name}: the leanest layout needs "
        f"{size(min(needs))} of the {size(has)} that a GPU has for it, "
        f"{size(min(needs) - has)} too much; use more GPUs or a chip with more memory"
    )


def _ours(config: Config) -> str:
    """Return the entry of machines.yaml of a run."""
    return "rollcall compiled" if config.train.compile else "rollcall"


def _layout(config: Config, ranks: int, machine: Machine) -> Layout:
    """Return the layout of a run."""
    degrees = config.parallel.degrees(ranks, min(ranks, machine.node))
    shard, expert = degrees.get("shard", 1), degrees.get("expert", 1)
    data = degrees.get("replicate", 1) * shard * expert
    schedule = config.parallel.schedule_name
    batch, micro = config.data.global_batch, config.data.micro_batch
    return Layout(
        data=data,
        tensor=degrees.get("tensor", 1),
        stages=degrees.get("pipeline", 1),
        context=degrees.get("context", 1),
        expert=expert,
        zero=config.parallel.stage if shard > 1 else 0,
        shard=shard * expert if degrees.get("replicate", 1) > 1 else 0,
        schedule=schedule,
        chunks=config.parallel.stages_per_rank if schedule in LOOPED else 1,
        micro=micro if isinstance(micro, int) else -(-batch // data),
        batch=batch,
        sequence=config.parallel.sequence_parallel,
        precision=config.precision,
        scattered=config.parallel.reduce_scatter == "micro-batch",
        recompute=RECOMPUTE.get(config.model.activation_checkpointing, "none"),
    )


def _measured(
    directory: Path, options: argparse.Namespace, machines: Machines
) -> tuple[search.Choice, float, float, Machine]:
    """Return a run's plan, seconds of its steps, the part in which it waits for data, its chip."""
    config = parse([str(directory / "config.yaml")])[1]
    started = (read_events(directory, "started") or [{"time": 0.0}])[-1]
    program, precision = _ours(config), config.precision
    machine = machines.machine(options.gpu, program, precision, options.node_size, options.fabric)
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
    waits = statistics.median(line.data_wait for line in late)
    layout = _layout(config, int(started.get("world_size", 1)), machine)
    from rollcall.tools.plan import own_model as plan_model  # late: it imports torch

    model = plan_model.describe(config)
    seconds, needed = step_time.of(model, layout, machine), memory.of(model, layout, machine)
    return search.Choice(layout, seconds, needed), config.data.global_batch / rate, waits, machine


def _factor(options: argparse.Namespace, machines: Machines) -> float:
    """Return measured over planned time: of a run, or as a number."""
    word = options.calibrate or "1"
    if directory := run_named(word, "config.yaml"):
        choice, seconds, *_ = _measured(directory, options, machines)
        return seconds / choice.time
    return _number("no such run; --calibrate", 0.01, MOST, word)


def _beside_measured(directory: Path, options: argparse.Namespace, machines: Machines) -> str:
    """Compare a run's step with its plan, term by term."""
    _only(options, "the plan of a run", "gpu", "node_size", "fabric", "json")
    if len(options.words) > 1:
        raise RefusedError(f"the plan of a run takes no keys: {options.words[1]}")
    choice, seconds, waits, machine = _measured(directory, options, machines)
    planned, factor = choice.time, seconds / choice.time
    if options.json:
        values = {"measured": seconds, "predicted": planned, "factor": factor}
        return json.dumps({**values, "terms": choice.seconds}, indent=2)
    return "\n".join(
        [
            f"{directory.name}: a step took {duration(seconds)}, of which "
            f"{duration(seconds * waits)} waiting for data; the plan says {duration(planned)} on "
            f"{choice.layout.ranks} {machine.chip.name}.",
            *report.why(choice, machine),
            f"Measured over planned: {factor:.3f}. To plan with it: --calibrate {directory}.",
        ]
    )
