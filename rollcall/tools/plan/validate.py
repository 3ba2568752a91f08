"""Compare the planner with tables of measurements: `rollcall plan --validate FOLDER`."""

import csv
import dataclasses
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import table
from rollcall.tools.plan import memory, shapes, step_time
from rollcall.tools.plan.layout import Layout, Terms
from rollcall.tools.plan.machine import Machine, Machines
from rollcall.tools.plan.margins import KNOWN, Margin, margin
from rollcall.tools.plan.model import Model, transformer

COLUMNS = (
    "table model layers hidden heads kv_heads ffn vocab gated tied seq gpu gpus precision dp tp pp "
    "cp vp zero sp recompute mbs gbs software step_time_s mem_gb status"
)
NUMBERS = ("layers", "hidden", "heads", "ffn", "vocab", "seq", "gpus", "gbs")
SHAPE = ("table", "model", "layers", "hidden", "seq", "gpu", "precision", "software")
CELL = (*SHAPE, "gpus")
STAGE = (*SHAPE, "tp", "cp", "sp", "recompute")
GROUP = ("gpu", "precision", "software")
SLOWER = 2.0
"""A row was disturbed if its micro-batch took this many times as long as a like one."""
STALLED = 0.02
"""A run below this fraction of the chip's peak waited for something that no layout explains."""
MEANINGS = """\
time, factored, memory, regret: medians of the absolute errors; inside: measured times in the range
that a plan prints; factored: with one factor from other models or numbers of GPUs of the same chip,
precision and software; consistent, as all kinds of layouts: no measured row contradicts them; held
out: consistent, and no fitted number is of this model on that number of GPUs."""


class Row(NamedTuple):
    """A measurement, and what the planner says of it: a time of 0 if it cannot run."""

    cells: dict[str, str]
    machine: Machine
    layout: Layout
    model: Model
    seconds: float | None  # measured
    predicted: float
    needed: Terms
    margin: Margin

    def key(self, *columns: str) -> tuple[str, ...]:
        """Return the values of some columns."""
        return tuple(self.cells[name] for name in columns)

    @property
    def ran(self) -> bool:
        """True if the run did not crash."""
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

    @property
    def was_fitted(self) -> bool:
        """True if the fitted numbers come from measurements of this model and number of GPUs."""
        seen = KNOWN["seen"].get(self.machine.software.name, {})
        return self.layout.ranks in seen.get("x".join(self.key("layers", "hidden")), ())


def read(folder: str, machines: Machines) -> tuple[list[Row], list[str]]:
    """Return the rows of all tables of a folder, and why some cannot be planned."""
    rows, left_out = [], []
    for path in sorted(Path(folder).glob("*.csv")):
        try:
            text = path.read_text("utf-8-sig").splitlines()
            lines = [*csv.DictReader(text, restval="")]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise RefusedError(f"--validate {path}: {error}") from None
        for number, cells in enumerate(lines, 2):
            if missing := set(COLUMNS.split()) - cells.keys():
                raise RefusedError(f"{path}: no column {', '.join(sorted(missing))}")
            try:
                rows.append(_row(cells, machines))
            except (ValueError, ArithmeticError, RefusedError) as error:
                left_out.append(f"{path.name}, line {number}: {error}")
    if not rows:
        first = f" and rows that can be planned; {left_out[0]}" if left_out else " and rows"
        raise RefusedError(f"--validate {folder}: expected a folder with tables *.csv{first}")
    return rows, left_out


def _row(cells: dict[str, str], machines: Machines) -> Row:
    def whole(name: str, default: int = 1) -> int:
        return int(float(cells[name])) if cells.get(name) else default

    is_mixture = cells.get("arch", "") not in ("", "dense") or whole("ep") > 1
    if is_mixture and not shapes.find(cells["model"]):
        raise ValueError("no column says how many experts there are, and the model is not known")
    if empty := [name for name in NUMBERS if not float(cells[name] or 0) >= 1]:
        raise ValueError(f"no {', '.join(empty)} from 1 on")
    precision = "fp8" if "fp8" in cells["precision"] else cells["precision"] or "bf16"
    node = whole("gpus_per_node", 0) or None
    machine = machines.machine(cells["gpu"], cells["software"], precision, node)
    shape = {name: whole(name, 0) for name in (*NUMBERS[:5], "gated", "tied")}
    shape |= {"kv_heads": whole("kv_heads", shape["heads"]), "length": whole("seq")}
    known = shapes.named(cells["model"], shape["length"]) if is_mixture else None
    model = known or transformer(cells["model"], **shape)
    names = {"tensor": "tp", "stages": "pp", "context": "cp", "chunks": "vp", "expert": "ep"}
    degrees: dict[str, Any] = {name: whole(column) for name, column in names.items()}
    spread = degrees["tensor"] * degrees["stages"] * degrees["context"]
    if whole("gpus") % spread:
        raise ValueError(f"{whole('gpus')} GPUs cannot be cut into groups of {spread}")
    layout = Layout(
        **degrees,
        data=whole("gpus") // spread,
        zero=whole("zero", 0),
        sequence=bool(whole("sp")) if cells["sp"] else machine.software.sequence,
        micro=whole("mbs"),
        batch=whole("gbs"),
        recompute=cells["recompute"].replace("unknown", "") or "none",
        precision=precision,
    )
    for name in ("step_time_s", "mem_gb"):
        if cells[name] and not 0 < float(cells[name]) < math.inf:
            raise ValueError(f"{name}: expected a number above 0, got {cells[name]}")
    seconds = float(cells["step_time_s"]) if cells["step_time_s"] else None
    fits = layout.stages * layout.chunks <= model.layers + 2  # ends may be layers
    if machine.software.fills:  # norm, head and loss can fill the last two stages, but no more
        is_full = 0 not in step_time.cuts(model, layout, machine)[:-2]
        fits = fits and is_full and layout.micro_batches >= layout.stages - 1
    needed = memory.of(model, layout, machine) if fits else Terms()
    predicted = step_time.of(model, layout, machine).total() if fits else 0.0
    likely = margin(model, layout, machine)
    return Row(cells, machine, layout, model, seconds, predicted, needed, likely)


def consistent(rows: Sequence[Row]) -> tuple[list[Row], Counter[str]]:
    """Return the rows that no measured row contradicts, and how many are left out, by reason.

    A run can be slower than its layout allows, but not faster. So of two rows that cannot both be
    right, the slower or crashed one was disturbed. No prediction has a say in this.
    """
    alike = defaultdict(list)
    for row in rows:
        if row.seconds:
            alike[row.key(*STAGE)].append(row)
    agreeing, reasons = [], Counter[str]()
    for row in rows:
        peak = row.machine.chip.flops[row.layout.precision] * row.layout.ranks
        done = row.model.flops() * row.layout.batch
        if row.seconds and done < STALLED * peak * row.seconds:
            reasons[f"below {STALLED:.0%} of the chip's peak"] += 1
        elif any(_contradicts(other, row) for other in alike[row.key(*STAGE)]):
            reasons["much slower than a like row" if row.ran else "crashed, a like row ran"] += 1
        else:
            agreeing.append(row)
    return agreeing, reasons


def _contradicts(other: Row, row: Row) -> bool:
    """Return True if a measured row shows that another one was disturbed."""
    mine, theirs = row.layout, other.layout
    if not row.ran:
        return dataclasses.replace(mine, zero=theirs.zero) == theirs and mine.zero >= theirs.zero
    # Samples and layers of a micro-batch take their share. Without a pipeline, the end of a step
    # counts: more data ranks do not make it shorter.
    larger = max(1, mine.micro / theirs.micro) * max(1, theirs.stages / mine.stages)
    is_like = min(mine.stages, theirs.stages) > 1 or theirs.data >= mine.data
    return is_like and row.slot > SLOWER * other.slot * larger


def report(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the errors of each table, and of the parts of it that MEANINGS explains."""
    lines = []
    for name in dict.fromkeys(row.cells["table"] for row in rows):
        members = [row for row in rows if row.cells["table"] == name]
        agreeing, reasons = consistent(members)
        parts = {"consistent": agreeing, "held out": [r for r in agreeing if not r.was_fitted]}
        for kind in sorted({row.margin.kind for row in agreeing}):
            parts[kind] = [row for row in agreeing if row.margin.kind == kind]
        whole = {"table": name, "rows": "all", **errors(members, members), "left out": reasons}
        lines += [whole] + [
            {"table": name, "rows": part, **errors(chosen, agreeing)}
            for part, chosen in parts.items()
            if 0 < len(chosen) < len(members)
        ]
    return lines


def errors(rows: Sequence[Row], members: Sequence[Row]) -> dict[str, Any]:
    """Return the errors of rows; factors come from the `members` of their table."""
    timed = [row for row in rows if row.seconds and row.predicted]
    cells, groups = defaultdict(list), defaultdict(list)
    for row in (row for row in members if row.seconds and row.predicted):
        groups[row.key(*GROUP)].append(row)
    for row in timed:
        cells[row.key(*CELL)].append(row)
    factored = []
    for cell, inside in cells.items():
        same = groups[inside[0].key(*GROUP)]
        if others := [row.ratio for row in same if row.key(*CELL) != cell]:
            factored += [row.ratio / statistics.median(others) for row in inside]
    ran, crashed = ([row for row in rows if row.ran == has_run] for has_run in (True, False))
    held = [row for row in ran if row.cells["mem_gb"] and row.needed]
    judged = [row for row in ran if row.cells["recompute"] != "unknown"]
    needed = [(row.needed.total() - memory.CONTEXT) / 2**30 for row in held]
    memories = [used / float(row.cells["mem_gb"]) for used, row in zip(needed, held, strict=True)]
    ratios = [row.ratio for row in timed]
    return {
        "count": len(rows),
        **_spread("time", ratios),
        "sign": statistics.median(ratios) - 1 if ratios else None,
        "inside": _share([row.margin.low <= 1 / row.ratio <= row.margin.high for row in timed]),
        **_spread("factored", factored),
        **_spread("memory", memories),
        "recall": _share([not row.fits for row in crashed]),
        "alarms": _share([not row.fits for row in judged]),
        **_spread("regret", [_regret(same) for same in cells.values() if len(same) > 1]),
    }


def _regret(rows: Sequence[Row]) -> float:
    """Return the time per sample of the layout that the planner chooses, relative to the best."""
    fitting = [row for row in rows if row.fits] or rows
    chosen = min(fitting, key=lambda row: (row.predicted / row.layout.batch, row.seconds))
    times = [(row.seconds or 0) / row.layout.batch for row in (chosen, *rows)]
    return times[0] / min(times)


def _spread(name: str, ratios: Sequence[float]) -> dict[str, float | None]:
    """Return the median and the 90th percentile of the errors."""
    errors = [abs(ratio - 1) for ratio in ratios]
    if not errors:
        return {name: None, f"{name} p90": None}
    twice = errors * 2 if len(errors) == 1 else errors  # quantiles need two values
    p90 = statistics.quantiles(twice, n=10, method="inclusive")[-1]
    return {name: statistics.median(errors), f"{name} p90": p90}


def _share(outcomes: Sequence[bool]) -> float | None:
    return sum(outcomes) / len(outcomes) if outcomes else None


def show(folder: str, machines: Machines, as_json: bool) -> None:
    """Print the report."""
    rows, left_out = read(folder, machines)
    lines = report(rows)
    if as_json:
        print(json.dumps({"tables": lines, "left out": left_out}, indent=2))
        return
    reasons = {line["table"]: line.pop("left out") for line in lines if "left out" in line}
    shown = [[key.split()[-1] for key in line] for line in lines[:1]]
    for line in lines:
        values = [f"{value:.1%}" if isinstance(value, float) else value for value in line.values()]
        shown.append(["–" if value is None else str(value) for value in values])
    print("\n".join(table(shown)), MEANINGS, sep="\n")
    for name, counts in reasons.items():
        for reason, count in counts.items():
            print(f"{name}: not consistent: {count} rows: {reason}")
    if left_out:
        print(f"{len(left_out)} rows cannot be planned, such as {left_out[0]}")
