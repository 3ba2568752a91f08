"""The rooms of the project: which folder imports which, and how full a folder may be.

`python tests/unit/test_structure.py` prints the figures of docs/architecture.md.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "rollcall"
ENTRIES = (PACKAGE, f"{PACKAGE}.__main__")
"""Modules for users, which nothing in the project imports: the package, and its `__main__`."""
TOOLS = ("accept", "bench", "drill", "lint", "plan", "report")
MOST_FILES = 16
CORE_LINES, TOOLS_LINES = 39_236, 8_000
"""The lines of Python that `rollcall/` without its tools, and the tools, stay below."""
SLACK = 10
"""Lines by which a room may differ from its budget."""
# Lines of Python of each room. Lower a number when code goes. A commit that raises one says what
# the room gives for it: a lower loss, a higher speed, a fault survived. `python` with this file's
# name prints the table as it is now.
BUDGET: dict[str, int] = {
    "rollcall": 65,
    "rollcall/cli": 292,
    "rollcall/config": 2474,
    "rollcall/launch": 1,
    "rollcall/launch/api": 385,
    "rollcall/launch/batch": 660,
    "rollcall/launch/commands": 994,
    "rollcall/launch/doctor": 1273,
    "rollcall/launch/frameworks": 285,
    "rollcall/launch/node": 1685,
    "rollcall/launch/program": 509,
    "rollcall/launch/rank": 861,
    "rollcall/launch/remote": 133,
    "rollcall/launch/runs": 2006,
    "rollcall/launch/scheduler": 700,
    "rollcall/launch/submission": 2315,
    "rollcall/launch/sweep": 407,
    "rollcall/messages": 255,
    "rollcall/records": 1174,
    "rollcall/system": 850,
    "rollcall/tools": 1,
    "rollcall/tools/accept": 572,
    "rollcall/tools/bench": 1637,
    "rollcall/tools/drill": 398,
    "rollcall/tools/lint": 1441,
    "rollcall/tools/plan": 2256,
    "rollcall/tools/report": 1693,
    "rollcall/train": 2600,
    "rollcall/train/checkpoint": 3189,
    "rollcall/train/data": 2881,
    "rollcall/train/exact": 517,
    "rollcall/train/health": 1299,
    "rollcall/train/inference": 765,
    "rollcall/train/loggers": 272,
    "rollcall/train/models": 1201,
    "rollcall/train/numerics": 2006,
    "rollcall/train/parallel": 3218,
    "rollcall/train/profiling": 603,
    "rollcall/train/ranks": 1632,
    "rollcall/train/recovery": 551,
    "rollcall/train/torch_private": 330,
    "rollcall/train/weights": 846,
}
MAPS = (
    *("train/README.md", "launch/README.md", "docs/architecture.md", "CONTRIBUTING.md"),
    *(f"rollcall/tools/{tool}/README.md" for tool in TOOLS),
)
Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for folder, folders, files in os.walk(ROOT / PACKAGE):
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
    """What both halves share knows neither; `train` does not know `launch`; none knows a tool."""
    for name, others in of_modules().items():
        half = name.split(".")[1]
        halves = {other.split(".")[1] for other in others if "." in other}
        unknown = {"train": {"launch", "tools"}, "launch": {"tools"}, "tools": set()}
        assert not halves & unknown.get(half, {"train", "launch", "tools"}), name
        assert "train" not in halves or half != "launch" or ".rank." in name, name


def test_only_training_and_the_start_of_ranks_import_torch() -> None:
    for name, path in modules().items():
        rooms = ("train.", "launch.rank.", "tools.bench.", "tools.accept.checks", "tools.plan.")
        may = name.startswith(tuple(f"{PACKAGE}.{room}" for room in rooms))
        for node in [] if may else ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "torch" for name in names), path


PRIVATE = f"{PACKAGE}.train.torch_private"
DOCUMENTED = {"_replace", "_asdict", "_exit", "_current_frames"}
"""Names of Python that are public in spite of the underscore: namedtuple, os and sys."""
OF_PYTHON = {
    "cli.parser": {"_actions", "_SubParsersAction"},  # argparse does not list its arguments
    "launch.rank.fork": {"_registry"},  # weakref has no word for "not at exit"
    "launch.rank.process": {"_shutdown", "_run_exitfuncs"},  # the end of an interpreter, in parts
    "launch.rank.user_program": {"_run_module_as_main"},  # the whole of `python -m`
    "launch.submission.executors": {"_submit_command"},  # submitit has no word for another sbatch
    "launch.submission.options": {"_option_string_actions"},  # argparse does not list its options
    "train.models.huggingface": {"_tp_plan"},  # of transformers, which documents it for models
}
"""Private names of others than torch, by the one module that uses them."""


def test_one_package_uses_private_names_of_torch() -> None:
    """A private name is one that no file of the package defines, or that is imported."""
    trees = {name: ast.parse(path.read_text()) for name, path in modules().items()}
    defined = {name for tree in trees.values() for name in _defined(tree)} | DOCUMENTED
    foreign: dict[str, set[str]] = {}
    for module, tree in trees.items():
        if not module.startswith(PRIVATE):
            names = set(_used(tree)) - defined - OF_PYTHON.get(module.partition(".")[2], set())
            foreign.setdefault(module, set()).update(names, _imported_privates(tree))
    assert {module: names for module, names in foreign.items() if names} == {}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(tree: ast.AST) -> Iterator[str]:
    """The private names of functions, classes and attributes that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = ast.unparse(node.value)
            if owner in ("self", "cls"):
                yield node.attr


def _used(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            yield node.attr


def _imported_privates(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                if any(map(_is_private, f"{module}.{alias.name}".split("."))):
                    yield f"{module}.{alias.name}"


def test_a_private_name_is_seen_however_it_is_used() -> None:
    planted = """
import torch._dynamo
from torch.optim import _muon
from torch.utils._pytree import tree_map
torch._foreach_norm([])
optimizer._init_group({})
torch.Tensor._version
"""
    tree = ast.parse(planted)
    assert {*_used(tree)} == {"_foreach_norm", "_init_group", "_version"}
    assert {*_imported_privates(tree)} == {
        ".torch._dynamo",
        "torch.optim._muon",
        "torch.utils._pytree.tree_map",
    }


def test_no_folder_is_full() -> None:
    counts: dict[Path, int] = {}
    for path in modules().values():
        counts[path.parent] = counts.get(path.parent, 0) + 1
    assert {str(folder): count for folder, count in counts.items() if count > MOST_FILES} == {}


def lines_of_rooms() -> dict[str, int]:
    """Lines of Python by room: a folder of a half, a tool, or another folder of the package."""
    counts: dict[str, int] = {}
    for path in modules().values():
        folders = path.relative_to(ROOT).parts[:-1]
        room = "/".join(
            folders[: 3 if folders[1:2] in [("train",), ("launch",), ("tools",)] else 2]
        )
        counts[room] = counts.get(room, 0) + path.read_text().count("\n")
    return dict(sorted(counts.items()))


def test_every_room_keeps_to_its_budget() -> None:
    counts = lines_of_rooms()
    assert counts.keys() == BUDGET.keys()
    wrong = {
        room: f"{lines} lines, budget {BUDGET[room]}"
        for room, lines in counts.items()
        if abs(lines - BUDGET[room]) > SLACK
    }
    assert wrong == {}, "raise a number only with a reason; lower it when code goes"


def test_the_core_and_the_tools_stay_small() -> None:
    counts = lines_of_rooms()
    tools = sum(lines for room, lines in counts.items() if room.startswith(f"{PACKAGE}/tools"))
    assert tools < TOOLS_LINES
    assert sum(counts.values()) - tools < CORE_LINES


def test_no_file_is_a_link() -> None:
    """A copy that follows links, or an archive without them, would be another project."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.check_output(listed, text=True).split("\0")[:-1]
    folders = {folder for name in names for folder in (ROOT / name).parents}
    assert [path for path in (*map(ROOT.joinpath, names), *folders) if path.is_symlink()] == []


def paths_in(page: Path) -> set[str]:
    """The files, folders and modules that a page names in code spans, and its links' targets."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", text)
    paths = {span for span in spans if re.fullmatch(r"[\w.-]+(/[\w.*-]*)+|\w+\.(py|toml)", span)}
    exported = set(re.findall(r"\w+", (ROOT / PACKAGE / "__init__.py").read_text()))
    modules = {span for span in spans if re.fullmatch(r"rollcall(\.\w+)+", span)}
    paths |= {it.replace(".", "/") for it in modules if it.partition(".")[2] not in exported}
    paths |= {f"./{target}" for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)}
    # Those that the reader is asked to write, and those of a run directory.
    new = re.findall(r"(?:here|The file)\s+`([^`]+\.py)`", text)
    return {path for path in paths if path not in new and not path.startswith("runs/")}


@pytest.mark.parametrize("name", MAPS)
def test_the_files_that_a_map_names_exist(name: str) -> None:
    """A path counts from the top, the page, the package, or the half that the page is about.

    A file name alone may lie anywhere in the package.
    """
    page = ROOT / name
    starts = [
        page.parent,
        ROOT,
        *(ROOT / PACKAGE / half for half in ("", "train", "launch", "tools")),
    ]
    files = {path.name for path in (ROOT / PACKAGE).rglob("*.*")}
    missing = {
        path
        for path in paths_in(page)
        if path not in files
        and not any([*start.glob(path)] or (start / f"{path}.py").is_file() for start in starts)
    }
    assert paths_in(page) and missing == set()


@pytest.mark.parametrize("name", [name for name in MAPS if name.endswith("README.md")])
def test_the_classes_and_methods_that_a_map_names_exist(name: str) -> None:
    names = re.findall(r"`([A-Z]\w*[a-z]\w*)(?:\.(\w+))?`", (ROOT / name).read_text())
    members: dict[str, set[str]] = {}
    for path in modules().values():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                of_class = [it.name for it in node.body if isinstance(it, ast.FunctionDef)]
                members.setdefault(node.name, set()).update(of_class)
    missing = {
        f"{kind}.{method}" if method else kind
        for kind, method in names
        if kind not in members or (method and method not in members[kind])
    }
    assert missing == set()


if __name__ == "__main__":
    counts = lines_of_rooms()
    print(
        "BUDGET = {", *(f'    "{room}": {lines},' for room, lines in counts.items()), "}", sep="\n"
    )
    tools = sum(lines for room, lines in counts.items() if room.startswith(f"{PACKAGE}/tools"))
    print(f"core: {sum(counts.values()) - tools} lines, tools: {tools} lines")
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
