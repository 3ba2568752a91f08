"""Time, cost, checkpoints and failures of a whole run, without the time in the queue."""

import math
from contextlib import suppress
from typing import NamedTuple

from rollcall.messages.refusal import RefusedError
from rollcall.tools.plan.model import Model

FAILURES = 6.5e-3
"""Interruptions for each day of each node, of Meta's cluster RSC-1, https://arxiv.org/abs/2410.21680."""
STATE = 12
"""Bytes of a checkpoint for each weight: the weight and Adam's two moments in fp32."""
PAUSE = 5.0
"""Seconds that training pauses for a checkpoint, which is written in the background."""
RESTART = 600.0
"""Seconds from a failure to the first step after it."""


class RunCost(NamedTuple):
    """A run to its budget, in seconds and bytes."""

    steps: int
    busy: float  # in steps
    checkpoint: int
    interval: float  # between checkpoints
    between_failures: float
    failures: float
    goodput: float  # the fraction of the time that ends up in the result
    whole: float  # from start to end, failures included


def budget(text: str) -> float:
    """Read a number of tokens or samples such as 15T or 300e9."""
    unit = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}.get(text[-1:], 1.0)
    with suppress(ValueError):
        if 0 < (number := unit * float(text if unit == 1 else text[:-1])) < 1e30:
            return number
    raise RefusedError(
        f"--budget {text}: expected a number of tokens or samples such as 15T or 300e9"
    )


def cost(model: Model, step: float, batch: int, amount: float, nodes: int, rate: float) -> RunCost:
    """Return what a run of `amount` tokens or samples needs; `rate` is of failures.

    The best interval and the goodput are Young's and Daly's first order,
    https://doi.org/10.1145/361147.361115: half an interval and a restart are lost in each failure.

    Raises:
        RefusedError: the budget is less than a step, or failures leave no time to train.
    """
    per_step = batch * model.length
    if amount < per_step:
        raise RefusedError(
            f"--budget {amount:,.0f} is less than the {per_step:,} "
            f"{'tokens' if model.length > 1 else 'samples'} of one step; choose a larger budget or "
            "a smaller --batch"
        )
    steps = math.ceil(amount / per_step)
    between = 86400 / (nodes * rate) if rate else math.inf
    interval = math.sqrt(2 * PAUSE * between) if rate else steps * step
    lost = PAUSE / interval + (interval / 2 + RESTART) / between
    if lost >= 1:
        raise RefusedError(
            f"{nodes} nodes fail every {between:.0f} s, sooner than a run restarts; use fewer "
            "nodes, or --failures with a lower rate"
        )
    busy, size, goodput = steps * step, model.weights * STATE, 1 - lost
    whole = busy / goodput
    return RunCost(steps, busy, size, interval, between, whole / between, goodput, whole)
