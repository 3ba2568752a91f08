"""The uses of a GPU in the product, and the tests that reach them on a CPU.

`python tests/helpers/gpu_lines.py record PYTEST-WORDS...` runs tests and notes which of these
uses they reach, also in the processes that they start. `python tests/helpers/gpu_lines.py write`
puts the list into docs/gpu.md. A unit test fails if a use is missing there. Files, lines and tests
may move: a use is known by its function, and a test by its module.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from checkout import HELPERS, ROOT

PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- lines -->\n", "<!-- end of lines -->\n"
NAMES = re.compile(
    r"\b(?:is_cuda|pin_memory|record_stream|nvtx|can_device_access_peer|cuda(?:\.\w+)*)\b"
)
WORDS = re.compile(r"\b(?:cuda|nccl|nvidia-smi)\b")
NOTES = "ROLLCALL_GPU_LINES"
"""The folder where the processes of a recording note what they reach."""
NEVER = "never run"
REASONS = {
    "experts._products": "grouped products in bf16, which are kernels of CUDA",
    "torch_private.record_memory": "CUPTI, which needs a driver",
    "replicate._hook": "NCCL on at least two GPUs",
    "world.World.replicate": "DDP, whose buckets are C++",
}
"""Needs of the uses that no test reaches, by function."""
UNSEEN = {
    "build.Builder._verify": "test_a_failed_installation_names_cause_and_cure",
    "choose._driver_of_nvidia_smi": "test_a_driver_that_only_other_sources_show",
}
"""Tests of env/run, by what they reach: its Python ignores PYTHONPATH, so no recording sees it."""
COPY = re.compile(r"^/.*/code(-\d+)?/")
"""The copy of the code that a run keeps, and runs."""


class Use(NamedTuple):
    """A use of a GPU: names that do not change when a file or a line moves."""

    function: str  # with the name of its module, without its folders
    what: str  # the attribute or the word; several uses of it in a function count as one


def find() -> dict[Use, list[tuple[str, int]]]:
    """Return the uses of a GPU in the product, each with its lines: file and number."""
    uses: dict[Use, list[tuple[str, int]]] = {}
    for room in ("rollcall", "env"):
        for path in (ROOT / room).rglob("*.py"):
            for number, use in _uses(path):
                uses.setdefault(use, []).append((str(path.relative_to(ROOT)), number))
    return dict(sorted(uses.items()))


def _uses(path: Path) -> Iterator[tuple[int, Use]]:
    source = path.read_text()
    if not (NAMES.search(source) or WORDS.search(source)):
        return
    module = path.parent.name if path.stem == "__init__" else path.stem
    names, lines = _functions(ast.parse(source), f"{module}."), source.splitlines()
    for kind, text, (number, column) in _tokens(source):
        name = names.get(number)
        if name is None:  # texts and tables of a module are data
            continue
        if kind == tokenize.NAME and (match := NAMES.match(lines[number - 1], column)):
            yield number, Use(name, match[0])
        elif kind == tokenize.STRING and "\n" not in text:
            yield from ((number, Use(name, f'"{word}"')) for word in WORDS.findall(text))


def _tokens(source: str) -> Iterator[tuple[int, str, tuple[int, int]]]:
    """Yield kind, text and place of tokens; an f-string is one, as it was before Python 3.12."""
    start, end = getattr(tokenize, "FSTRING_START", None), getattr(tokenize, "FSTRING_END", None)
    parts: list[tokenize.TokenInfo] = []
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        depth += (token.type == start) - (token.type == end)
        parts.append(token)
        if depth == 0:
            kind = token.type if len(parts) == 1 else tokenize.STRING
            yield kind, "".join(part.string for part in parts), parts[0].start
            parts.clear()


def _functions(tree: ast.AST, prefix: str) -> dict[int, str]:
    """Return the innermost function of each line that is in one, without its docstring."""
    names: dict[int, str] = {}
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if body:
                span = range(body[0].lineno, (node.end_lineno or body[-1].lineno) + 1)
                names |= dict.fromkeys(span, f"{prefix}{node.name}")
        named = is_function or isinstance(node, ast.ClassDef)
        names |= _functions(node, f"{prefix}{getattr(node, 'name', '')}." if named else prefix)
    return names


def read() -> dict[Use, str]:
    """Return the list in the page: the test that reaches a use, or that none does."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = re.findall(r"^\| `(.*?)` \| `(.*?)` \| (.*?) \|$", table, re.MULTILINE)
    return {Use(function, what): by for function, what, by in rows}


def write(reached: Mapping[Use, str]) -> None:
    """Write the list into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    rows = ["| function | uses | test |", "| --- | --- | --- |"]
    for use in find():
        by = reached.get(use, f"{NEVER}: {REASONS.get(use.function, 'nobody wrote down why')}")
        if test := UNSEEN.get(use.function):
            by = f"`test_env_run::{test}`"
        rows.append(f"| `{use.function}` | `{use.what}` | {by} |")
    PAGE.write_text(before + BEGIN + "\n".join(rows) + "\n" + END + rest.partition(END)[2])


def record(words: list[str]) -> None:
    """Run tests, and write the list with what they reached beside what was known."""
    known = {use: by for use, by in read().items() if not by.startswith(NEVER)}
    uses = find()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text("import gpu_lines\ngpu_lines.watch()\n")
        lines = [line for lines in uses.values() for line in lines]
        Path(folder, "lines.json").write_text(json.dumps(lines))
        paths = [folder, str(HELPERS), os.environ.get("PYTHONPATH", "")]
        place = {NOTES: folder, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        subprocess.run(["pytest", *words], cwd=ROOT, env={**os.environ, **place}, check=False)
        for note in sorted(Path(folder).glob("*.notes")):
            for row in note.read_text().splitlines():
                file, number, test = row.split("\t")
                for use, lines in uses.items():
                    if (file, int(number)) in lines:
                        known.setdefault(use, f"`{test}`")
    write(known)


def watch() -> None:
    """Note each line of the list that this process, or one that it forks, reaches."""
    wanted: dict[str, set[int]] = {}
    for file, number in json.loads(Path(os.environ[NOTES], "lines.json").read_text()):
        wanted.setdefault(file, set()).add(number)
    codes: dict[CodeType, set[int]] = {}
    seen: set[tuple[str, int]] = set()

    def in_function(frame: FrameType, event: str, _: Any) -> Any:
        numbers = codes[frame.f_code]
        if event == "line" and frame.f_lineno in numbers:
            numbers.discard(frame.f_lineno)
            _note(_file(frame.f_code), frame.f_lineno, seen)
        return in_function if numbers else None

    def at_call(frame: FrameType, *_: Any) -> Any:
        code = frame.f_code
        if code not in codes:
            lines = {number for *_, number in code.co_lines() if number is not None}
            codes[code] = lines & wanted.get(_file(code), set())
        return in_function if codes[code] else None

    import threading

    threading.settrace(at_call)
    sys.settrace(at_call)


def _file(code: CodeType) -> str:
    """Return a file of the product by its place in the checkout, also if a run's copy ran."""
    return COPY.sub("", code.co_filename.removeprefix(f"{ROOT}/"))


def _note(file: str, number: int, seen: set[tuple[str, int]]) -> None:
    words = re.match(r"(?:.*/)?(\w+)\.py::(\w+)", os.environ.get("PYTEST_CURRENT_TEST", ""))
    test = f"{words[1]}::{words[2]}" if words else ""
    if test and (file, number) not in seen:
        seen.add((file, number))
        with (Path(os.environ[NOTES]) / f"{os.getpid()}.notes").open("a") as notes:
            notes.write(f"{file}\t{number}\t{test}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["record"]:
        record(sys.argv[2:])
    else:
        write(read())
