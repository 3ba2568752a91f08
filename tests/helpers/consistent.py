"""Rows of measurements that agree with each other, and the ones that the fit has seen."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections import defaultdict

from rollcall.tools.plan import validate

FITTED = {"llmfoundry", "ultrascale", "vtrain_single"}
"""Tables whose rows have had a say in the fitted numbers: half of their cells."""
EQUAL = 1.05
"""A row was disturbed if its time is this multiple of an equal row's, or more; or the time of its
micro-batch that of a larger one."""
TWINS = 1.25
"""The same for layouts that differ in ZeRO 0 or 1, which changes only the end of a step."""
SLOTS = 2.0
"""The same for a micro-batch in a pipeline whose stages have no more layers."""
STALLED = 0.02
"""A run below this fraction of the chip's peak waited for something that no layout explains."""
DEGREES = ("dp", "tp", "pp", "cp", "vp", "sp", "recompute", "mbs", "gbs", "software")
STAGE = [name for name in validate.CELL if name != "gpus"] + ["tp", "cp", "sp", "recompute"]


def slot(row: validate.Row) -> float:
    """Seconds of a micro-batch, with the pipeline's bubble counted in micro-batches."""
    layout = row.layout
    return (row.seconds or 0) / (layout.micro_batches + (layout.stages - 1) / layout.chunks)


def was_disturbed(row: validate.Row, other: validate.Row) -> bool:
    """Return True if a micro-batch took far longer, though layers and samples take their share.

    If only the micro-batch differs, the smaller one takes no longer at all.
    """
    mine, theirs = row.layout, other.layout
    is_smaller = mine.micro < theirs.micro and mine.micro_batches >= theirs.micro_batches
    if is_smaller and dataclasses.replace(mine, micro=theirs.micro, batch=theirs.batch) == theirs:
        return slot(row) > EQUAL * slot(other)
    larger = max(1, mine.micro / theirs.micro) * max(1, theirs.stages / mine.stages)
    # Without a pipeline, the end of a step counts: more data ranks do not make it shorter.
    is_like = min(mine.stages, theirs.stages) > 1 or theirs.data >= mine.data
    return is_like and slot(row) > SLOTS * slot(other) * larger


def was_fitted(row: validate.Row) -> bool:
    """True if the row is in the half of the cells that the fitted numbers come from."""
    name = " ".join(row.key("table", "model", "layers", "hidden", "gpus"))
    return row.cells["table"] in FITTED and zlib.crc32(name.encode()) % 2 == 0


def contradicted(rows: list[validate.Row]) -> set[int]:
    """Return the places of rows that a faster row contradicts, or that stalled.

    A run can be slower than its layout allows, but not faster; so of two rows that cannot both be
    right, the slower one is disturbed. No prediction has a say in this.
    """
    equal, alike = defaultdict(list), defaultdict(list)
    disturbed = set()
    for number, row in enumerate(rows):
        layout, seconds = row.layout, row.seconds
        key = row.key(*validate.SHAPE, *DEGREES)
        equal[EQUAL, (*key, row.cells["zero"])].append((seconds or math.inf, number))
        if seconds and layout.zero < 2:
            equal[TWINS, key].append((seconds, number))
        if seconds:
            alike[row.key(*STAGE)].append((number, row))
        peak = row.machine.chip.flops[layout.precision] * layout.ranks
        if seconds and row.model.flops() * layout.batch < STALLED * peak * seconds:
            disturbed.add(number)
    for (most, _), members in equal.items():
        disturbed |= {number for seconds, number in members if seconds > most * min(members)[0]}
    for pairs in alike.values():
        disturbed |= {
            number for number, row in pairs if any(was_disturbed(row, two) for _, two in pairs)
        }
    return disturbed
