"""Fit the planner's numbers to tables, and say how well they fit a table that was left out.

    ./env/run python tests/campaigns/fit_planner.py FOLDER

For each table of FOLDER: fit on the others from one neutral start, and print the error on that
table. The program of the table that is left out has the host's time of the others, the default's
network and no stall; then the same with all numbers of the default program. Then follow a fit on
half of all cells, and the intervals for margins.yaml.
The first lines say how far the rows of a table agree: the errors if each row is corrected by those
of its nearest rows. Nothing is written.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import random
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from rollcall.tools.plan import step_time, validate
from rollcall.tools.plan.machine import Machine, Machines, Software

START = {"PASSES": 1.3, "LINKS_INSIDE": 0.7, "SLOWED": 0.3}
START |= {"A100 product": 0.75, "A100 attention": 0.45, "H100 product": 0.75}
START |= {"H100 attention": 0.45, "vtrain host": 3e-3, "nanotron host": 3e-3}
START |= {"nanotron stall": 1e-3, "nanotron hop": 3e-5, "nanotron reach": 0.6}
NEAR = 0.01
"""Weight of the squared logarithms of what the fit multiplied the start by."""
PROGRAMS = {"vtrain_single": "vtrain", "ultrascale": "nanotron"}
NEIGHBOURS = 3
COLUMNS = ("layers", "hidden", "seq", "dp", "tp", "pp", "zero", "mbs", "gbs")
PROFILE = ("hidden", "tp", "mbs")
"""What rows of vTrain share whose times are sums of the same measurements."""
Numbers = dict[str, float]
SOME = 5
"""Rows from which on a table has its own quantiles."""
LOW, HIGH = 0.05, 0.95
"""Nine of ten measured times are between these quantiles."""


def with_numbers(machine: Machine, numbers: Numbers) -> Machine:
    """Return a machine with the numbers of its chip and program."""

    def of(name: str) -> dict[str, Any]:
        return {key.split()[1]: numbers[key] for key in numbers if key.startswith(f"{name} ")}

    chip = dataclasses.replace(machine.chip, **of(machine.chip.name.split("-")[0]))
    software = Software(**vars(machine.software) | of(machine.software.name))
    return dataclasses.replace(machine, chip=chip, software=software)


def ratios(rows: list[validate.Row], numbers: Numbers) -> list[float]:
    """Return predicted over measured times."""
    for key, value in numbers.items():
        if " " not in key:
            setattr(step_time, key, value)
    machines: dict[tuple[str, str, int], Machine] = {}
    found = []
    for row in rows:
        place = (row.machine.chip.name, row.machine.software.name, row.machine.node)
        machine = machines.setdefault(place, with_numbers(row.machine, numbers))
        found.append(step_time.of(row.model, row.layout, machine).total() / (row.seconds or 1))
    return found


def loss(tables: list[list[validate.Row]], numbers: Numbers) -> float:
    """Return the mean over the tables of the errors, each at most 0.3, and how far the fit went.

    Two tables leave some numbers open; these stay near the start.
    """
    means = []
    for rows in tables:
        errors = [min(0.3, abs(math.log(ratio))) for ratio in ratios(rows, numbers)]
        means.append(statistics.fmean(errors))
    apart = sum(math.log(value / START[key]) ** 2 for key, value in numbers.items())
    return statistics.fmean(means) + NEAR * apart


def fit(tables: list[list[validate.Row]], numbers: Numbers, fitted: list[str]) -> Numbers:
    """Change one number after the other while that helps, by smaller and smaller steps."""
    best = loss(tables, numbers)
    for step in (1.2, 1.1, 1.05, 1.025, 1.0125):
        for key in fitted:
            for times in (step, 1 / step):
                while (
                    found := loss(tables, tried := numbers | {key: numbers[key] * times})
                ) < best:
                    numbers, best = tried, found
    return numbers


def show(name: str, rows: list[validate.Row], numbers: Numbers) -> list[float]:
    """Print the errors without and with a factor, and the numbers; return the ratios."""
    groups = defaultdict(list)
    found = ratios(rows, numbers)
    keys = [row.key("gpu", "precision", "software") for row in rows]
    for key, ratio in zip(keys, found, strict=True):
        groups[key].append(ratio)
    middle = {key: statistics.median(members) for key, members in groups.items()}
    errors = [abs(ratio - 1) for ratio in found]
    factored = [abs(ratio / middle[key] - 1) for key, ratio in zip(keys, found, strict=True)]
    print(
        f"{name}: median {statistics.median(errors):.1%}, "
        f"sign {statistics.median(found) - 1:+.1%}, "
        f"with a factor {statistics.median(factored):.1%}; "
        + ", ".join(f"{key} {value:.3g}" for key, value in numbers.items())
    )
    return found


class Kinds(dict[str, dict[str, list[float]]]):
    """Measured over predicted times: for each kind of layout, each table with equal weight."""

    def add(self, rows: list[validate.Row], values: list[float]) -> None:
        """Add the values of a table's rows."""
        for row, value in zip(rows, values, strict=True):
            tables = self.setdefault(row.margin.kind, {})
            tables.setdefault(row.cells["table"], []).append(value)

    def interval(self, kind: str) -> list[float]:
        """Return the quantiles of a kind, as wide as those of any table with some rows of it.

        What one program alone has run is as wide as the rest.
        """
        tables = [*self[kind].values()]
        parts = [quantiles(tables)]
        parts += [quantiles([table]) for table in tables if len(table) >= SOME]
        if self.hull and len(tables) == 1:
            parts.append(
                quantiles([t for kinds in self.values() if len(kinds) > 1 for t in kinds.values()])
            )
        lows, highs = zip(*parts, strict=True)
        return [round(min(lows), 2), round(max(highs), 2)]

    hull = False


def quantiles(tables: list[list[float]]) -> list[float]:
    """Return the ends of the interval, each table with equal weight."""
    values = sorted((value, 1 / len(table)) for table in tables for value in table)
    whole = sum(weight for _, weight in values)
    sums = list(itertools.accumulate(weight for _, weight in values))
    return [values[bisect.bisect_left(sums, q * whole - 1e-9)][0] for q in (LOW, HIGH)]


def beside(rows: list[validate.Row], values: list[float]) -> list[float]:
    """Return what remains of each error after the factor of another row of its kind and chip."""
    draw = random.Random(0)
    groups = defaultdict(list)
    keys = [(*row.key(*validate.GROUP), row.margin.kind) for row in rows]
    for key, value in zip(keys, values, strict=True):
        groups[key].append(value)
    return [value / draw.choice(groups[key]) for key, value in zip(keys, values, strict=True)]


def neighbours(rows: list[validate.Row]) -> float:
    """Return the median error if each row is corrected by its nearest rows' measured errors."""
    is_profiled = rows[0].cells["table"].startswith("vtrain")
    places = [[math.log2(float(row.cells[name] or 0) or 0.5) for name in COLUMNS] for row in rows]
    profiles = [row.key(*PROFILE) if is_profiled else row.key("row") for row in rows]
    found = ratios(rows, {})
    errors = []
    for place, profile, ratio in zip(places, profiles, found, strict=True):
        others = (at for at, other in enumerate(profiles) if other != profile)
        nearest = sorted(others, key=lambda at: math.dist(places[at], place))[:NEIGHBOURS]
        errors.append(abs(ratio / statistics.median(found[at] for at in nearest) - 1))
    return statistics.median(errors)


def main() -> None:
    """Print a line for each table."""
    rows, _ = validate.consistent(validate.read(sys.argv[1], Machines())[0])
    tables: dict[str, list[validate.Row]] = defaultdict(list)
    for row in rows:
        if row.seconds and row.predicted:
            tables[row.cells["table"]].append(row)
    if len(tables) < 2:
        sys.exit(f"{sys.argv[1]}: expected at least two tables, found {len(tables)}")
    kinds = {"fitted": Kinds(), "other": Kinds(), "calibrated": Kinds()}
    kinds["other"].hull = True
    for members in tables.values():
        some = [row for row in members if row.was_fitted]
        kinds["fitted"].add(some, [1 / row.ratio for row in some])
    for name, members in tables.items():
        print(f"{name}: as the nearest {NEIGHBOURS} rows were off: {neighbours(members):.1%}")
    for name, left_out in tables.items():
        own = f"{PROGRAMS.get(name, '-')} "
        fitted = [key for key in START if not key.startswith(own)]
        others = [members[::4] for other, members in tables.items() if other != name]
        numbers = fit(others, {key: START[key] for key in fitted}, fitted)
        if name in PROGRAMS:
            hosts = [value for key, value in numbers.items() if key.endswith("host")]
            numbers |= {own + "host": statistics.fmean(hosts)}
            links = {own + "stall": 0.0, own + "hop": 4e-6, own + "reach": 0.9}
            numbers |= links if name == "ultrascale" else {}
        show(f"without {name}", left_out, numbers)
        # The delays between nodes are the program's, and known to be.
        mine = {key: numbers[key] for key in numbers if key != own + "stall" and key != own + "hop"}
        values = [1 / ratio for ratio in ratios(left_out, mine)]
        half = [place for place, row in enumerate(left_out) if row.was_fitted]
        some = [left_out[place] for place in half]
        kinds["other"].add(some, [values[place] for place in half])
        kinds["calibrated"].add(some, beside(some, [values[place] for place in half]))
        software = {chip: Machines().software("unknown", chip) for chip in ("A100", "H100")}
        unknown = [
            row._replace(
                machine=dataclasses.replace(
                    row.machine, software=software[row.machine.chip.name.split("-")[0]]
                )
            )
            for row in left_out
        ]
        found = show(f"without {name}, as a program that is not known", unknown, numbers)
        inside = [place for place in half if "over nodes" not in left_out[place].margin.kind]
        kinds["other"].add([left_out[at] for at in inside], [1 / found[at] for at in inside])
    halves = [[row for row in members if row.was_fitted][::2] for members in tables.values()]
    numbers = fit(halves, START, list(START))
    show("all", [row for members in tables.values() for row in members], numbers)
    print("For margins.yaml, from the half of the cells that the fit uses:")
    for kind in kinds["fitted"]:
        ends = {name: known.interval(kind) for name, known in kinds.items()}
        print(f"  {kind}:", "{" + ", ".join(f"{n}: {end}" for n, end in ends.items()) + "}")


if __name__ == "__main__":
    main()
