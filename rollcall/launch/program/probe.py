"""Run in a job's Python: report its version and what a program imports, as JSON.

Words: the program's directory, then a script, or `-m` and modules. Nothing of the program is run:
its imports are read from its source, and so are the imports of the user's modules.
This file needs no package, and Python 3.7 can run it too, to say that it is too old.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INSTALLED = ("site-packages", "dist-packages")
STANDARD = getattr(sys, "stdlib_module_names", sys.builtin_module_names)


class Scan:
    """The modules that a program imports, by where they lie."""

    def __init__(self) -> None:
        self.own: dict[str, Path] = {}  # neither standard nor installed, and their places
        self.missing: dict[str, str] = {}  # modules that were not found, and who imports them
        self.broken = ""  # the first syntax error in what is sure to be imported
        self.changes_path = False  # whether the code uses sys.path: more modules may be found
        self._seen: dict[Path, bool] = {}  # whether it is sure to be imported
        self._waiting: list[tuple[Path, str, bool]] = []
        self._places: dict[str, tuple[str, Path]] = {}

    def read(self, *files: Path) -> None:
        """Read these files, and then every module of the user's that was found and not yet read."""
        self._waiting += [(file, "", True) for file in files]
        while self._waiting:
            path, package, is_sure = self._waiting.pop()
            is_new = path not in self._seen or (is_sure and not self._seen[path])
            if is_new and (path.suffix == ".py" or path in files) and path.is_file():
                self._seen[path] = is_sure
                try:
                    with contextlib.suppress(ValueError, OSError):
                        text = path.read_bytes()
                        is_archive = b"\0" in text and path.suffix != ".py"
                        code = b"" if is_archive else text
                        self._visit(ast.parse(code), path, package, is_sure)
                except SyntaxError as error:
                    place = f"{path}:{error.lineno}: {type(error).__name__}: {error.msg}"
                    self.broken = self.broken or (place if is_sure else "")

    def _visit(self, above: ast.AST, path: Path, package: str, is_sure: bool) -> None:
        optional = (ast.Try, ast.If, ast.With, ast.FunctionDef, ast.AsyncFunctionDef)
        is_sure = is_sure and not isinstance(above, optional)
        for node in ast.iter_child_nodes(above):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.find(alias.name, f"{path}:{node.lineno}", is_sure)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = package.split(".")
                    parts = parts[: len(parts) - node.level + 1]
                    base = ".".join([*parts, base] if base else parts)
                for alias in node.names if base else ():
                    self.find(f"{base}.{alias.name}", f"{path}:{node.lineno}", is_sure)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                self.changes_path |= (node.value.id, node.attr) == ("sys", "path")
            self._visit(node, path, package, is_sure)

    def find(self, name: str, where: str, is_sure: bool = True) -> None:
        """Find a module by its dotted name, whose last part may be an attribute instead."""
        top, *parts = name.split(".")
        if top not in self._places:
            self._places[top] = _locate(top)
        kind, place = self._places[top]
        if kind == "missing" and is_sure:
            self.missing.setdefault(top, where)
        elif kind == "own":
            self.own[top] = place
            package = top
            if top == "rollcall":  # the run has a copy of it, and to read all of it takes a second
                return
            self._waiting.append((_source(place), package, is_sure))
            for part in parts:
                place = place / part
                if place.is_dir():
                    package = f"{package}.{part}"
                    self._waiting.append((_source(place), package, is_sure))
                else:
                    self._waiting.append((place.with_suffix(".py"), package, is_sure))


def _locate(top: str) -> tuple[str, Path]:
    """Return what kind of module this is, and its place if it is the user's own."""
    if top in STANDARD:
        return "standard", Path()
    spec = _spec(top)
    if spec is None:
        return "missing", Path()
    found = [*(spec.submodule_search_locations or []), spec.origin or ""][0]
    if not Path(found).exists() or _is_installed(Path(found).resolve(), top):
        return "installed", Path()
    return "own", Path(found).resolve()


def _spec(name: str) -> Any:
    with contextlib.suppress(Exception):  # a finder of a package may raise anything
        return importlib.util.find_spec(name)
    return None


def _source(place: Path) -> Path:
    return place / "__init__.py" if place.is_dir() else place


def _is_installed(place: Path, top: str) -> bool:
    """Whether a module belongs to Python or was installed; not if the user develops it there."""
    if any(part in INSTALLED for part in place.parts):
        return True
    standard = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    if any(root in place.parents for root in standard):
        return True
    # `pip install --target` writes a list of files beside the packages.
    for record in place.parent.glob("*.dist-info/RECORD"):
        with contextlib.suppress(OSError), record.open() as lines:
            if any(line.startswith((f"{top}/", f"{top}.")) for line in lines):
                return True
    return False


def _shadows(root: Path, known: dict[str, Path]) -> bool:
    """Whether searching a directory first would change what else is imported."""
    for entry in root.iterdir():
        name = entry.stem
        is_module = entry.suffix == ".py" or (entry / "__init__.py").is_file()
        if is_module and name.isidentifier() and name not in known:
            spec = _spec(name)
            origin = Path(spec.origin or root / name).resolve() if spec else entry
            if name in STANDARD or root not in origin.parents:
                return True
    return False


def _version(package: str) -> str | None:
    with contextlib.suppress(Exception):  # not installed under this name
        from importlib.metadata import version

        return version(package)
    return None


def report(program: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields of Facts in python.py; modules are searched from `sys.path[0]` on."""
    modules = program[1:] if program[:1] == ("-m",) else ()
    scan = Scan()
    for name in modules:
        scan.find(name, f"-m {name}")
        scan.find(f"{name}.__main__", f"-m {name}")
        scan.read()
    if program and not modules:
        scan.read(Path(program[0]))
    roots = {place.parent for place in scan.own.values()}
    return {
        "python": "{}.{}.{}".format(*sys.version_info[:3]),
        "executable": sys.executable,
        "first": str(Path(sys.path[0]).resolve()),
        "torch": _version("torch"),
        "own": {name: str(place) for name, place in scan.own.items()},
        "shadowing": [str(root) for root in roots if _shadows(root, scan.own)],
        "broken": scan.broken,
        "missing": {} if scan.changes_path else scan.missing,
    }


def main(directory: str, *program: str) -> None:
    """Print the report about a program that is started in a directory."""
    os.chdir(directory)
    is_script = bool(program) and program[0] != "-m"
    # As for the program itself; until here it was this file's directory.
    sys.path[0] = str(Path(program[0]).parent) if is_script else directory
    print(json.dumps(report(program)))


if __name__ == "__main__":
    main(*sys.argv[1:])
