"""The rooms of the project: which folder imports which, and how full a folder may be.

`python tests/unit/test_structure.py` prints the figures of docs/architecture.md.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "rollcall"
ENTRIES = (PACKAGE, f"{PACKAGE}.__main__")
"""What users import or run, and nothing in the project imports: the package, and its `__main__`."""
MOST_FILES = 16
Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name, through the links to train and launch."""
    found = {}
    for folder, folders, files in os.walk(ROOT / PACKAGE, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in files:
            if name.endswith(".py"):
                path = Path(folder, name)
                dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                found[dotted.removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of the package that a file imports anywhere, for types too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known else str(node.module)


@functools.cache
def of_modules() -> Graph:
    known = modules()
    return {
        name: set(imported(path, known)) - {name}
        for name, path in known.items()
        if name not in ENTRIES
    }


def of_folders() -> Graph:
    """The arrows between folders; a package's `__init__` belongs to its folder."""
    known = modules()

    def folder(name: str) -> str:
        return name if known[name].name == "__init__.py" else name.rpartition(".")[0]

    arrows: Graph = {}
    for name, others in of_modules().items():
        arrows.setdefault(folder(name), set()).update(map(folder, others))
    return {name: others - {name} for name, others in arrows.items()}


def circles(arrows: Graph) -> list[list[str]]:
    """The groups of nodes that reach each other."""
    reach = {name: _reachable(name, arrows) for name in arrows}
    groups = {
        tuple(sorted({name, *(other for other in reach[name] if name in reach.get(other, ()))}))
        for name in arrows
    }
    return [list(group) for group in sorted(groups) if len(group) > 1]


def _reachable(start: str, arrows: Graph) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for other in arrows.get(waiting.pop(), set()) - found:
            found.add(other)
            waiting.append(other)
    return found


def test_no_import_runs_in_a_circle() -> None:
    assert circles(of_modules()) == []


def test_no_two_folders_import_each_other() -> None:
    arrows = of_folders()
    pairs = [(a, b) for a in arrows for b in arrows[a] if a < b and a in arrows.get(b, ())]
    assert pairs == []


def test_the_halves_know_only_what_they_may() -> None:
    """`train` does not know `launch`, and what both share knows neither."""
    for name, others in of_modules().items():
        half = name.split(".")[1]
        halves = {other.split(".")[1] for other in others if "." in other}
        if half == "train":
            assert "launch" not in halves, name
        elif half not in ("launch", "bench", "accept"):
            assert not halves & {"launch", "train"}, name


def test_only_training_and_the_start_of_ranks_import_torch() -> None:
    for name, path in modules().items():
        rooms = (".train.", ".launch.rank.", ".bench.", ".accept.checks")
        may = name.startswith(tuple(f"{PACKAGE}{room}" for room in rooms))
        for node in [] if may else ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "torch" for name in names), path


def test_no_folder_is_full() -> None:
    counts: dict[Path, int] = {}
    for path in modules().values():
        counts[path.parent] = counts.get(path.parent, 0) + 1
    assert {str(folder): count for folder, count in counts.items() if count > MOST_FILES} == {}


if __name__ == "__main__":
    folders = of_folders()
    print("circles of modules:", circles(of_modules()))
    print("circles of folders:", circles(folders))
    pairs = [(a, b) for a in folders for b in folders[a] if a < b and a in folders.get(b, ())]
    for first, second in pairs:
        print("pair:", first, second)
        for name, others in of_modules().items():
            for other in others:
                if {name.rpartition(".")[0], other.rpartition(".")[0]} == {first, second}:
                    print("   ", name, "->", other)
    print(f"{len(folders)} folders, {sum(map(len, folders.values()))} arrows between them")
