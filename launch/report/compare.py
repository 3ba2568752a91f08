"""`rollcall compare RUN RUN…`: show what differs between runs in configuration, code and result."""

import math
from collections.abc import Iterator, Sequence

from rollcall.launch.report import story
from rollcall.launch.report.story import Story, clock, value_of
from rollcall.launch.runs import find
from rollcall.records.code import CodeRecord
from rollcall.refusal import RefusedError
from rollcall.text import listed, table

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
    lines = [["", *(each.name for each in stories)]]
    for title, rows in groups.items():
        lines += [[title.upper(), *[""] * len(stories)]]
        lines += [[f"  {name}", *values] for name, *values in rows]
    print("\n".join(table(lines)))
    if "configuration" not in groups:
        print("their configurations are equal")
    if (found := best(stories)) is not None:
        print(f"best {story.title_of(found[1]).lower()}: {stories[found[0]].name}")
    return 0


def differences(stories: Sequence[Story]) -> dict[str, list[list[str]]]:
    """Return three tables without titles: a name, then each run's value.

    Of configuration and code, they have what differs; of the result, everything that is known.
    """
    settings = [one.cell or {it: text for it, (text, _) in one.settings.items()} for one in stories]
    facts = [{**each.facts, **_packages(each)} for each in stories]
    return {
        "configuration": _differing(settings),
        "code and machines": [*_differing(facts, True), *_files(stories)],
        "result": list(_results(stories)),
    }


def best(stories: Sequence[Story]) -> tuple[int, str] | None:
    """Return the place of the best run, and by which curve's last value; None if none has one."""
    for key in RESULTS:
        known = {it: each.result[key] for it, each in enumerate(stories) if key in each.result}
        if known:
            return (max if key == "val_accuracy" else min)(known, key=known.__getitem__), key
    return None


def ranked(stories: Sequence[Story]) -> list[Story]:
    """Return the cells of a sweep, the best first; other runs keep their order."""
    found = best(stories)
    if found is None or not all(each.sweep for each in stories):
        return list(stories)
    sign = -1 if found[1] == "val_accuracy" else 1
    return sorted(stories, key=lambda each: sign * each.result.get(found[1], sign * math.inf))


def _differing(values: Sequence[dict[str, str]], is_partial: bool = False) -> list[list[str]]:
    """Return the rows that differ; an unknown value differs from none."""
    names = dict.fromkeys(name for each in values for name in each if name not in NOT_COMPARED)
    rows = [[name, *(each.get(name, "") for each in values)] for name in names]
    return [row for row in rows if len({*row[1:]} - ({""} if is_partial else set())) > 1]


def _packages(each: Story) -> dict[str, str]:
    """Return the versions of the packages at submission, by name."""
    try:
        lines = (each.run.job / "packages.txt").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("==") for line in lines)
    return {f"package {name}": version for name, _, version in pairs if name not in each.facts}


def _files(stories: Sequence[Story]) -> Iterator[list[str]]:
    """Yield a row with the files of the code that differ from the first run's, if any do."""
    records = [CodeRecord.read(each.run.job / "source.json") for each in stories]
    files = [record.files if record is not None else {} for record in records]
    changed = [sorted({name for name, _ in files[0].items() ^ each.items()}) for each in files]
    if any(changed) and all(files):
        yield ["changed files", *(listed(names, 3) for names in changed)]


def _results(stories: Sequence[Story]) -> Iterator[list[str]]:
    """Yield the name of each result, and its value in each run."""
    yield ["state", *(each.condition.state for each in stories)]
    steps = [each.progress.step for each in stories]
    yield ["steps", *("" if step is None else f"{step:,}" for step in steps)]
    for key in dict.fromkeys(key for each in stories for key in each.newest):
        if key.startswith("val_") or key in ("loss", "samples_per_second"):
            found = (each.newest.get(key) for each in stories)
            shown = ("" if value is None else value_of(key, value) for value in found)
            yield [story.title_of(key).lower(), *shown]
    yield ["attempts", *(str(each.condition.attempts or "") for each in stories)]
    yield ["started", *("" if each.started is None else clock(each.started) for each in stories)]
