"""The text and the JSON of `rollcall plan`."""

import json
import math
from collections.abc import Sequence

from rollcall.messages.text import duration, size, table
from rollcall.tools.plan.machine import Machine
from rollcall.tools.plan.margins import margin
from rollcall.tools.plan.model import Model
from rollcall.tools.plan.run_cost import RunCost
from rollcall.tools.plan.search import Choice


def speed(choice: Choice, model: Model, machine: Machine) -> tuple[float, float]:
    """Return samples per second, and the fraction of the chips' peak that the model's FLOPs use."""
    rate = choice.layout.batch / choice.time
    peak = machine.chip.flops[choice.layout.precision] * choice.layout.ranks
    return rate, rate * model.flops() / peak


def headline(model: Model, machine: Machine, gpus: int, batch: int, precision: str) -> str:
    """Say what is planned."""
    per = f" of {model.length:,} tokens" if model.length > 1 else ""
    return (
        f"{model.name}: {model.weights:,} parameters, {batch:,} samples{per} a step, {precision}, "
        f"on {gpus:,} {machine.chip.name} with {size(machine.chip.memory)}, {machine.host} a node"
    )


def choices(best: Sequence[Choice], model: Model, machine: Machine) -> list[str]:
    """Return a table of layouts."""
    unit = "tokens/s per GPU" if model.length > 1 else "samples/s per GPU"
    rows = [["", "mesh", "micro", "recompute", "step", "9 in 10", unit, "of peak", "memory"]]
    rows[0].append("most time in")
    for number, choice in enumerate(best, 1):
        rate, used = speed(choice, model, machine)
        layout, likely = choice.layout, margin(model, choice.layout, machine)
        shown = [w.partition("=")[2] for w in choice.words() if w.startswith("parallel.")]
        mesh = " ".join(word for word in shown if word not in ("zero3", "true"))
        others = {**choice.seconds, "matrix products": 0.0}
        rows.append(
            [
                str(number),
                mesh,
                str(layout.micro),
                layout.recompute,
                duration(choice.time),
                f"{duration(choice.time * likely.low)}–{duration(choice.time * likely.high)}",
                f"{rate * model.length / layout.ranks:,.0f}",
                f"{used:.0%}",
                size(choice.bytes.total()),
                f"products, {max(others, key=others.__getitem__)}",
            ]
        )
    return table(rows)


def why(choice: Choice, machine: Machine) -> list[str]:
    """Return the terms of a rank's memory and step."""
    rows = []
    for title, terms, show, of in (
        ("memory of the fullest rank", choice.bytes, size, f"of {size(machine.chip.memory)}"),
        ("step of the slowest rank", choice.seconds, duration, ""),
    ):
        rows.append([title, "", ""])
        rows += [[f"  {key}", show(x), f"{x / terms.total():.1%}"] for key, x in terms.items()]
        rows.append(["  sum", show(terms.total()), of])
    return table(rows)


def run(cost: RunCost, gpus: int, price: float | None) -> list[str]:
    """Say what the run to its budget takes."""
    hours = cost.whole / 3600 * gpus
    money = f", {hours * price:,.0f} at {price:g} per GPU-hour" if price else ""
    fails = math.isfinite(cost.between_failures)
    best = f", best every {duration(cost.interval)}" if fails else ""
    lines = [
        f"The run: {cost.steps:,} steps, {duration(cost.whole)}, {hours:,.0f} GPU-hours{money}; "
        f"queue aside.",
        f"Checkpoints: {size(cost.checkpoint)} each{best}.",
        f"Failures: one every {duration(cost.between_failures)}, {cost.failures:,.1f} in the "
        f"run; {cost.goodput:.1%} of the time ends up in the result.",
    ]
    return lines if fails else lines[:2]


def as_json(best: Sequence[Choice], model: Model, machine: Machine, cost: RunCost | None) -> str:
    """Return the plan as JSON: seconds, bytes and words of each layout."""
    plans = []
    for choice in best:
        rate, used = speed(choice, model, machine)
        sums = {"seconds": choice.time, "bytes": choice.bytes.total(), "samples_per_second": rate}
        terms = {"terms": choice.seconds, "memory": choice.bytes, "fraction_of_peak": used}
        likely = margin(model, choice.layout, machine)._asdict()
        plans.append({"words": choice.words(), **sums, **terms, "margin": likely})
    whole = cost and {**cost._asdict(), "seconds": cost.whole}
    facts = {"parameters": model.weights, "flops_per_sample": model.flops()}
    return json.dumps({"model": model.name, **facts, "layouts": plans, "run": whole}, indent=2)
