"""Compare the planner with tables of measurements: `rollcall plan --validate FOLDER`."""

import csv
import json
import math
import statistics
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import table
from rollcall.tools.plan import memory, step_time
from rollcall.tools.plan.layout import Layout, Terms
from rollcall.tools.plan.machine import Machine, Machines
from rollcall.tools.plan.model import Model, transformer

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
COLUMNS = (
    "table model layers hidden heads kv_heads ffn vocab gated tied seq gpu gpus precision dp tp pp "
    "cp vp zero sp recompute mbs gbs software step_time_s mem_gb status"
)
NUMBERS = ("layers", "hidden", "heads", "ffn", "vocab", "seq", "gpus", "gbs")
SHAPE = ("table", "model", "layers", "hidden", "seq", "gpus", "gpu", "precision")
DEGREES = ("dp", "tp", "pp", "cp", "vp", "sp", "recompute", "mbs", "gbs", "software")
STAGE = [name for name in (*SHAPE, "software", "tp", "cp", "sp", "recompute") if name != "gpus"]


class Row(NamedTuple):
    """A measurement, and what the planner says of it: a time of 0 if it cannot run."""

    cells: dict[str, str]
    machine: Machine
    layout: Layout
    model: Model
    seconds: float | None  # measured
    predicted: float
    needed: Terms

    def key(self, *columns: str) -> tuple[str, ...]:
        """Return the values of some columns."""
        return tuple(self.cells[name] for name in columns)

    @property
    def ran(self) -> bool:
        """True if the measured run did not crash."""
        return self.cells["status"] in ("", "ok")

    @property
    def fits(self) -> bool:
        """True if the planner says that it runs."""
        return self.predicted > 0 and memory.fits(self.needed, self.machine)

    @property
    def ratio(self) -> float:
        """Predicted over measured time."""
        assert self.seconds
        return self.predicted / self.seconds

    @property
    def slot(self) -> float:
        """Seconds of a micro-batch, with the pipeline's bubble counted in micro-batches."""
        layout = self.layout
        return (self.seconds or 0) / (layout.micro_batches + (layout.stages - 1) / layout.chunks)

    def was_disturbed(self, other: "Row") -> bool:
        """Return True if a micro-batch took far longer, though layers and samples take their share.

        If only the micro-batch differs, the smaller one takes no longer at all.
        """
        mine, theirs = self.layout, other.layout
        is_smaller = mine.micro < theirs.micro and mine.micro_batches >= theirs.micro_batches
        if is_smaller and replace(mine, micro=theirs.micro, batch=theirs.batch) == theirs:
            return self.slot > EQUAL * other.slot
        larger = max(1, mine.micro / theirs.micro) * max(1, theirs.stages / mine.stages)
        # Without a pipeline, the end of a step counts: more data ranks do not make it shorter.
        is_like = min(mine.stages, theirs.stages) > 1 or theirs.data >= mine.data
        return is_like and self.slot > SLOTS * other.slot * larger

    @property
    def was_fitted(self) -> bool:
        """True if the row is in the half of the cells that the fitted numbers come from."""
        name = " ".join(self.key("table", "model", "layers", "hidden", "gpus"))
        return self.cells["table"] in FITTED and zlib.crc32(name.encode()) % 2 == 0


def read(folder: str, machines: Machines) -> tuple[list[Row], list[str]]:
    """Return the rows of all tables of a folder, and why some cannot be planned."""
    files = sorted(Path(folder).glob("*.csv"))
    if not files:
        raise RefusedError(f"--validate {folder}: expected a folder with tables *.csv")
    rows, left_out = [], []
    for path in files:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise RefusedError(f"--validate {path}: {error}") from None
        for number, cells in enumerate(csv.DictReader(text.splitlines(), restval=""), 2):
            if missing := set(COLUMNS.split()) - cells.keys():
                raise RefusedError(f"{path}: no column {', '.join(sorted(missing))}")
            try:
                rows.append(_row(cells, machines))
            except (ValueError, ArithmeticError, RefusedError) as error:
                left_out.append(f"{path.name}, line {number}: {error}")
    return rows, left_out


def _row(cells: dict[str, str], machines: Machines) -> Row:
    def whole(name: str, default: int = 1) -> int:
        return int(float(cells[name])) if cells.get(name) else default

    if cells.get("arch", "") not in ("", "dense") or whole("ep") > 1:
        raise ValueError("only dense models are planned: no column says how many experts there are")
    if empty := [name for name in NUMBERS if not cells[name]]:
        raise ValueError(f"no {', '.join(empty)}")
    precision = "fp8" if "fp8" in cells["precision"] else cells["precision"] or "bf16"
    node = whole("gpus_per_node", 0) or None
    machine = machines.machine(cells["gpu"], cells["software"], precision, node)
    shape = {name: whole(name) for name in ("layers", "hidden", "heads", "ffn", "vocab")}
    shape |= {"kv_heads": whole("kv_heads", shape["heads"]), "length": whole("seq")}
    gated, tied = (bool(whole(name, 0)) for name in ("gated", "tied"))
    model = transformer(cells["model"], **shape, gated=gated, tied=tied)
    names = {"tensor": "tp", "stages": "pp", "context": "cp", "chunks": "vp", "micro": "mbs"}
    degrees = {name: whole(column) for name, column in names.items()}
    spread = degrees["tensor"] * degrees["stages"] * degrees["context"]
    if whole("gpus") % spread:
        raise ValueError(f"{whole('gpus')} GPUs cannot be cut into groups of {spread}")
    layout = Layout(
        **degrees,
        data=whole("gpus") // spread,
        zero=whole("zero", 0),
        sequence=bool(whole("sp")) if cells["sp"] else machine.software.sequence,
        batch=whole("gbs"),
        recompute=cells["recompute"] or "none",
        precision=precision,
    )
    seconds = float(cells["step_time_s"]) if cells["step_time_s"] else None
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"step_time_s: expected seconds above 0, got {seconds}")
    few = machine.software.fills and layout.micro_batches < layout.stages - 1
    if layout.stages * layout.chunks > model.layers + 2 or few:  # both ends may count as layers
        return Row(cells, machine, layout, model, seconds, 0.0, Terms())
    needed = memory.of(model, layout, machine)
    predicted = step_time.of(model, layout, machine).total()
    return Row(cells, machine, layout, model, seconds, predicted, needed)


def contradicted(rows: Sequence[Row]) -> set[int]:
    """Return the places of rows that a faster row contradicts, or that stalled.

    A run can be slower than its layout allows, but not faster; so of two rows that cannot both be
    right, the slower one is disturbed. No prediction has a say in this.
    """
    equal, alike = defaultdict(list), defaultdict(list)
    disturbed = set()
    for number, row in enumerate(rows):
        layout, seconds = row.layout, row.seconds
        key = row.key(*SHAPE, *DEGREES)
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
            number for number, row in pairs if any(row.was_disturbed(two) for _, two in pairs)
        }
    return disturbed


def report(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the errors of each table: of all rows, of the consistent, and of the held-out ones."""
    bad = contradicted(rows)
    consistent = [row for number, row in enumerate(rows) if number not in bad]
    held_out = [row for row in consistent if not row.was_fitted]
    kinds = {"all": rows, "consistent": consistent, "held out": held_out}
    lines = []
    for name in dict.fromkeys(row.cells["table"] for row in rows):
        for kind, members in kinds.items():
            if chosen := [row for row in members if row.cells["table"] == name]:
                lines.append({"table": name, "rows": kind, **_errors(chosen)})
    return lines


def _errors(rows: Sequence[Row]) -> dict[str, Any]:
    timed = [row for row in rows if row.seconds and row.predicted]
    groups, cells = defaultdict(list), defaultdict(list)
    for row in timed:
        groups[row.key("gpu", "precision", "software")].append(row.ratio)
        cells[row.key(*SHAPE)].append(row)
    factors = {key: 1 / statistics.median(ratios) for key, ratios in groups.items()}
    factored = [ratio * factor for key, factor in factors.items() for ratio in groups[key]]
    held = [row for row in rows if row.cells["mem_gb"] and row.ran and row.needed]
    needed = [(row.needed.total() - memory.CONTEXT) / 2**30 for row in held]
    memories = [used / float(row.cells["mem_gb"]) for used, row in zip(needed, held, strict=True)]
    regrets = [_regret(ratios) for ratios in cells.values() if len(ratios) > 1]
    return {
        "count": len(rows),
        "fitted": sum(row.was_fitted for row in rows),
        **_spread("time", [row.ratio for row in timed], "p90", "worst", "sign"),
        **_spread("factored", factored, "p90", "worst"),
        **_spread("memory", memories, "p90", "worst"),
        "recall": _share([not row.fits for row in rows if not row.ran]),
        "alarms": _share([not row.fits for row in rows if row.ran]),
        **_spread("regret", regrets, "p90"),
        "cells": len(regrets),
        "factors": {" ".join(key): round(factor, 3) for key, factor in factors.items()},
    }


def _regret(rows: Sequence[Row]) -> float:
    """Return the time per sample of the layout that the planner chooses, relative to the best."""
    times = {number: (row.seconds or 0) / row.layout.batch for number, row in enumerate(rows)}
    fitting = [number for number in times if rows[number].fits] or list(times)
    chosen = min(fitting, key=lambda number: rows[number].predicted / rows[number].layout.batch)
    return times[chosen] / min(times.values())


def _spread(name: str, ratios: Sequence[float], *more: str) -> dict[str, float | None]:
    """Return the median of the errors, and others of their statistics."""
    statistics_: dict[str, float | None] = dict.fromkeys(("median", *more))
    if ratios:
        errors = sorted(abs(ratio - 1) for ratio in ratios)
        statistics_["median"], sign = statistics.median(errors), statistics.median(ratios) - 1
        all_ = {"p90": errors[int(0.9 * (len(errors) - 1))], "worst": errors[-1], "sign": sign}
        statistics_ |= {key: all_[key] for key in more}
    return {
        name if key == "median" else f"{name} {key}": value for key, value in statistics_.items()
    }


def _share(outcomes: Sequence[bool]) -> float | None:
    return sum(outcomes) / len(outcomes) if outcomes else None


def show(folder: str, machines: Machines, as_json: bool) -> None:
    """Print the report."""
    rows, left_out = read(folder, machines)
    lines = report(rows)
    if as_json:
        print(json.dumps({"tables": lines, "left out": left_out}, indent=2))
        return
    shown = [[key.split()[-1] for key in line][:-1] for line in lines[:1]]
    for line in lines:
        values = [f"{value:.1%}" if isinstance(value, float) else value for value in line.values()]
        shown.append(["–" if value is None else str(value) for value in values[:-1]])
    print("\n".join(table(shown)))
    for line in lines:
        if line["rows"] == "consistent" and line["factors"]:
            factors = ", ".join(f"{key} {value}" for key, value in line["factors"].items())
            print(f"{line['table']}: measured over predicted time: {factors}")
    print(
        "time, factored, memory, regret: medians of the absolute errors; fitted: rows that had a "
        "say in the fitted numbers; consistent: without rows that others contradict or that "
        f"ran below {STALLED:.0%} of the chip's peak; held out: consistent, and not fitted."
    )
    if left_out:
        print(f"{len(left_out)} rows left out, such as {left_out[0]}")
