"""`rollcall compare RUN RUN…`: show what differs between runs in configuration, code and result."""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import mean, stdev
from typing import Any

from rollcall.launch.runs import find
from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import clock, did_you_mean, listed, table
from rollcall.records.code import CodeRecord
from rollcall.system.files import read_whole
from rollcall.tools.report import story
from rollcall.tools.report.story import Story, value_of

NOT_COMPARED = ("run.name", "run.root", "command")
"""Names of values that differ between any two runs."""
RESULTS = ("val_accuracy", "val_loss", "loss")
"""Results that rank runs: the first one that a run has counts; a high accuracy is best."""


def main(argv: Sequence[str]) -> int:
    """Print the table; return the exit code."""
    options = find.parser("compare", __doc__, nargs="+").parse_args(argv)
    stories = ranked(story.tell(story.chosen(options.run, options.root)))
    if len(stories) < 2:
        raise RefusedError(f"{stories[0].name} is one run: name at least two, or a sweep")
    groups = {title: rows for title, rows in differences(stories).items() if rows}
    lines = [["", *(run.name for run in stories)]]
    for title, rows in groups.items():
        lines += [[title.upper(), *[""] * len(stories)]]
        lines += [[f"  {name}", *values] for name, *values in rows]
    print("\n".join(table(lines)))
    if "configuration" not in groups:
        print("their configurations are equal")
    if (winner := best(stories)) is not None:
        print(f"best {story.title_of(winner[1]).lower()}: {stories[winner[0]].name}")
    return 0


def differences(stories: Sequence[Story]) -> dict[str, list[list[str]]]:
    """Return the differences in configuration and code, and all results: names and values."""
    settings = [run.cell for run in stories]
    if not all(settings):  # some are not of a sweep
        values = [{key: text for key, (text, _) in run.settings.items()} for run in stories]
        settings = [known or run.cell for run, known in zip(stories, values, strict=True)]
    facts = [{**run.facts, **_packages(run)} for run in stories]
    return {
        "configuration": _differing(settings),
        "code and machines": [*_differing(facts, True), *_files(stories)],
        "result": list(_results(stories)),
    }


def best(stories: Sequence[Story]) -> tuple[int, str] | None:
    """Return the place of the best run, and by which curve's last value; None if none has one."""
    for key in RESULTS:
        known = {number: run.result[key] for number, run in enumerate(stories) if key in run.result}
        if known:
            return _winner(key)(known, key=known.__getitem__), key
    return None


def _winner(key: str) -> Callable[..., Any]:
    """Return `max` for a curve of which more is better, otherwise `min`."""
    return max if key.endswith(("accuracy", "per_second")) else min


def grouped(stories: Sequence[Story], over: str) -> dict[tuple[str, ...], list[Story]]:
    """Return the runs by the other keys in which they differ: texts such as `optim.lr=0.1`.

    Raises:
        RefusedError: the runs do not differ in the key `over`.
    """
    values = {name: row for name, *row in differences(stories)["configuration"]}
    if over not in values:
        hint = did_you_mean(over, values) or f"; they differ in {listed([*values]) or 'nothing'}"
        raise RefusedError(f"--over {over}: the runs do not differ in it{hint}")
    del values[over]
    groups: dict[tuple[str, ...], list[Story]] = {}
    for number, run in enumerate(stories):
        pairs = tuple(f"{name}={row[number]}" for name, row in values.items())
        groups.setdefault(pairs, []).append(run)
    return groups


def over_seeds(stories: Sequence[Story]) -> list[list[str]]:
    """Return a table of mean and standard deviation over the seeds; empty for runs of one seed."""
    try:
        groups = grouped(stories, "seed")
    except RefusedError:
        return []
    keys = [key for key in RESULTS if all(key in run.result for run in stories)]
    names = [pair.partition("=")[0] for pair in next(iter(groups))]
    rows = [[*names, "runs", *map(story.title_of, keys)]]
    for pairs, runs in groups.items():
        rows.append([*(pair.partition("=")[2] for pair in pairs), str(len(runs))])
        for key in keys:
            known = [run.result[key] for run in runs]
            spread = f" ± {value_of(key, float(f'{stdev(known):.2g}'))}" if len(known) > 1 else ""
            rows[-1].append(f"{value_of(key, mean(known))}{spread}")
    return rows


def best_cells(stories: Sequence[Story]) -> dict[str, set[str]]:
    """Return the names of the runs that are best in a row of the results, by the row's name."""
    cells = {}
    for key in dict.fromkeys(key for run in stories for key in run.result):
        values = {run.name: run.result[key] for run in stories if key in run.result}
        winner = _winner(key)(values.values())
        if len({*values.values()}) > 1:
            names = {name for name, value in values.items() if value == winner}
            cells[story.title_of(key).lower()] = names
    return cells


def ranked(stories: Sequence[Story]) -> list[Story]:
    """Return the cells of a sweep, the best first; other runs keep their order."""
    winner = best(stories)
    if winner is None or not all(run.sweep for run in stories):
        return list(stories)
    sign = -1 if winner[1] == "val_accuracy" else 1
    return sorted(stories, key=lambda run: sign * run.result.get(winner[1], sign * math.inf))


def _differing(values: Sequence[dict[str, str]], is_partial: bool = False) -> list[list[str]]:
    """Return the rows that differ; an unknown value differs from none."""
    names = dict.fromkeys(name for column in values for name in column if name not in NOT_COMPARED)
    rows = [[name, *(column.get(name, "") for column in values)] for name in names]
    return [row for row in rows if len(_distinct(row[1:]) - ({""} if is_partial else set())) > 1]


def _distinct(values: Sequence[str]) -> set[str]:
    """Return the different values; a path that ends like a relative path is the same."""
    known = {*values}
    relative = [value for value in known if value and not value.startswith("/")]
    return {value for value in known if not any(value.endswith(f"/{end}") for end in relative)}


def _packages(run: Story) -> dict[str, str]:
    """Return the versions of the packages at submission, by name."""
    try:
        lines = read_whole(run.run.job / "packages.txt").decode(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("==") for line in lines)
    return {f"package {name}": version for name, _, version in pairs if name not in run.facts}


def _files(stories: Sequence[Story]) -> Iterator[list[str]]:
    """Yield a row with the files of the code that differ from the first run's, if any do."""
    records = [CodeRecord.read(run.run.job / "source.json") for run in stories]
    files = [record.files if record is not None else {} for record in records]
    changed = [sorted({name for name, _ in files[0].items() ^ run.items()}) for run in files]
    if any(changed) and all(files):
        yield ["changed files", *(listed(names, 3) for names in changed)]


def _results(stories: Sequence[Story]) -> Iterator[list[str]]:
    """Yield the name of each result, and its value in each run."""
    yield ["state", *(run.condition.state for run in stories)]
    steps = [run.progress.step for run in stories]
    yield ["steps", *("" if step is None else f"{step:,}" for step in steps)]
    for key in dict.fromkeys(key for run in stories for key in run.newest):
        if key.startswith("val_") or key in ("loss", "samples_per_second"):
            newest = (run.newest.get(key) for run in stories)
            shown = ("" if value is None else value_of(key, value) for value in newest)
            yield [story.title_of(key).lower(), *shown]
    yield ["attempts", *(str(run.condition.attempts or "") for run in stories)]
    yield ["started", *("" if run.started is None else clock(run.started) for run in stories)]
