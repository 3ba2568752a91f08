"""Compare the planner with tables of measurements: `rollcall plan --validate FOLDER`."""

import csv
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import table
from rollcall.tools.plan import memory, shapes, step_time
from rollcall.tools.plan.layout import Layout, Terms
from rollcall.tools.plan.machine import Machine, Machines
from rollcall.tools.plan.margins import Margin, margin
from rollcall.tools.plan.model import Model, transformer

COLUMNS = (
    "table model layers hidden heads kv_heads ffn vocab gated tied seq gpu gpus precision dp tp pp "
    "cp vp zero sp recompute mbs gbs software step_time_s mem_gb status"
)
NUMBERS = ("layers", "hidden", "heads", "ffn", "vocab", "seq", "gpus", "gbs")
SHAPE = ("table", "model", "layers", "hidden", "seq", "gpus", "gpu", "precision")
CELL = (*SHAPE, "software")
GROUP = ("gpu", "precision", "software")


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
    def fits(self) -> bool:
        """True if the planner says that it runs."""
        return self.predicted > 0 and memory.fits(self.needed, self.machine)

    @property
    def ratio(self) -> float:
        """Predicted over measured time."""
        assert self.seconds
        return self.predicted / self.seconds


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

    is_mixture = cells.get("arch", "") not in ("", "dense") or whole("ep") > 1
    if is_mixture and not shapes.find(cells["model"]):
        raise ValueError("no column says how many experts there are, and the model is not known")
    if empty := [name for name in NUMBERS if not cells[name]]:
        raise ValueError(f"no {', '.join(empty)}")
    precision = "fp8" if "fp8" in cells["precision"] else cells["precision"] or "bf16"
    node = whole("gpus_per_node", 0) or None
    machine = machines.machine(cells["gpu"], cells["software"], precision, node)
    shape = {name: whole(name, 0) for name in (*NUMBERS[:5], "gated", "tied")}
    shape |= {"kv_heads": whole("kv_heads", shape["heads"]), "length": whole("seq")}
    model = transformer(cells["model"], **shape)
    if is_mixture:
        model = shapes.named(cells["model"], shape["length"])
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
        recompute=cells["recompute"] or "none",
        precision=precision,
    )
    seconds = float(cells["step_time_s"]) if cells["step_time_s"] else None
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"step_time_s: expected seconds above 0, got {seconds}")
    few = machine.software.fills and layout.micro_batches < layout.stages - 1
    fits = layout.stages * layout.chunks <= model.layers + 2 and not few  # ends may be layers
    needed = memory.of(model, layout, machine) if fits else Terms()
    predicted = step_time.of(model, layout, machine).total() if fits else 0.0
    likely = margin(model, layout, machine)
    return Row(cells, machine, layout, model, seconds, predicted, needed, likely)


def report(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the errors of each table: of all its rows, and of each kind of layout."""
    lines = []
    for name in dict.fromkeys(row.cells["table"] for row in rows):
        members = [row for row in rows if row.cells["table"] == name]
        kinds = sorted({row.margin.kind for row in members})
        for kind in ["all", *(kinds if len(kinds) > 1 else [])]:
            chosen = [row for row in members if kind in ("all", row.margin.kind)]
            lines.append({"table": name, "rows": kind, **errors(chosen, members)})
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
    ran = [row for row in rows if row.cells["status"] in ("", "ok")]
    crashed = [row for row in rows if row.cells["status"] not in ("", "ok")]
    held = [row for row in ran if row.cells["mem_gb"] and row.needed]
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
        "alarms": _share([not row.fits for row in ran]),
        **_spread("regret", [_regret(same) for same in cells.values() if len(same) > 1]),
    }


def _regret(rows: Sequence[Row]) -> float:
    """Return the time per sample of the layout that the planner chooses, relative to the best."""
    fitting = [row for row in rows if row.fits] or rows
    chosen = min(fitting, key=lambda row: row.predicted / row.layout.batch)
    times = [(row.seconds or 0) / row.layout.batch for row in (chosen, *rows)]
    return times[0] / min(times)


def _spread(name: str, ratios: Sequence[float]) -> dict[str, float | None]:
    """Return the median and the 90th percentile of the errors."""
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    p90 = errors[int(0.9 * (len(errors) - 1))] if errors else None
    return {name: statistics.median(errors) if errors else None, f"{name} p90": p90}


def _share(outcomes: Sequence[bool]) -> float | None:
    return sum(outcomes) / len(outcomes) if outcomes else None


def show(folder: str, machines: Machines, as_json: bool) -> None:
    """Print the report."""
    rows, left_out = read(folder, machines)
    lines = report(rows)
    if as_json:
        print(json.dumps({"tables": lines, "left out": left_out}, indent=2))
        return
    shown = [[key.split()[-1] for key in line] for line in lines[:1]]
    for line in lines:
        values = [f"{value:.1%}" if isinstance(value, float) else value for value in line.values()]
        shown.append(["–" if value is None else str(value) for value in values])
    print("\n".join(table(shown)))
    print(
        "time, factored, memory, regret: medians of the absolute errors; inside: measured times in "
        "the interval that a plan prints; factored: with one factor from other models or numbers "
        "of GPUs of the same chip, precision and software."
    )
    if left_out:
        print(f"{len(left_out)} rows left out, such as {left_out[0]}")
