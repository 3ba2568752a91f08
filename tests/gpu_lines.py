"""The lines of the product that depend on a GPU, and the tests that reach them on a CPU.

`python tests/gpu_lines.py record PYTEST-WORDS...` runs tests and notes which of these lines they
reach, also in the processes that they start. `python tests/gpu_lines.py write` puts the list into
docs/gpu.md. A unit test fails if a line of the product is not in the list.
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

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- lines -->\n", "<!-- end of lines -->\n"
NAMES = {"cuda", "is_cuda", "pin_memory", "record_stream", "nvtx", "can_device_access_peer"}
WORDS = re.compile(r"\b(cuda|nccl|nvidia-smi)\b")
STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None)}  # the latter since 3.12
NOTES = "ROLLCALL_GPU_LINES"
"""The folder where the processes of a recording note what they reach."""
NEVER = "never run"
PROFILER = "CUPTI, which needs a driver"
REASONS = {
    ("train/profiling/profiler.py", "_Profile.__init__"): PROFILER,
    ("train/profiling/profiler.py", "_Profile.end"): PROFILER,
    ("train/parallel/replicate.py", "_hook"): "NCCL on at least two GPUs",
    ("train/dist/world.py", "World.replicate"): "DDP, whose buckets are C++",
}
"""Needs of the lines that no test reaches, by file and function."""
UNSEEN = {
    ("env/build.py", "Builder._verify"): "test_a_failed_installation_names_cause_and_cure",
    ("env/choose.py", "_driver_of_nvidia_smi"): "test_a_driver_that_only_other_sources_show",
}
"""Tests of env/run, by what they reach: its Python ignores PYTHONPATH, so no recording sees it."""
COPY = re.compile(r"^/.*/code(-\d+)?/")
"""The copy of the code that a run keeps, and runs."""
LINKED = ("rollcall/train/", "rollcall/launch/")


class Line(NamedTuple):
    """A line that depends on a GPU; equal lines of a function are one."""

    file: str
    function: str
    text: str


def find() -> dict[Line, list[int]]:
    """Return the lines of the product that depend on a GPU, with their numbers."""
    found: dict[Line, list[int]] = {}
    for room in ("train", "launch", "rollcall", "env"):
        for folder, _, files in os.walk(ROOT / room):  # it does not follow the links in rollcall/
            for name in sorted(files):
                if name.endswith(".py"):
                    for number, line in _lines(Path(folder, name)):
                        found.setdefault(line, []).append(number)
    return dict(sorted(found.items()))


def _lines(path: Path) -> Iterator[tuple[int, Line]]:
    source = path.read_text()
    names = _functions(ast.parse(source))
    texts = source.splitlines()
    numbers = dict.fromkeys(
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if (token.type == tokenize.NAME and token.string in NAMES)
        or (token.type in STRINGS and "\n" not in token.string and WORDS.search(token.string))
    )
    for number in numbers:
        name = names.get(number, "")
        if name:  # texts and tables of a module are data
            yield number, Line(str(path.relative_to(ROOT)), name, texts[number - 1].strip())


def _functions(tree: ast.AST, prefix: str = "") -> dict[int, str]:
    """Return the innermost function of each line that is in one, without its docstring."""
    found: dict[int, str] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{node.name}"
            first = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if first:
                start, end = first[0].lineno, node.end_lineno or first[-1].lineno
                found |= dict.fromkeys(range(start, end + 1), name)
            found |= _functions(node, f"{name}.")
        elif isinstance(node, ast.ClassDef):
            found |= _functions(node, f"{prefix}{node.name}.")
        else:
            found |= _functions(node, prefix)
    return found


def read() -> dict[Line, str]:
    """Return the list in the page: the test that reaches a line, or that none does."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = re.findall(
        r"^\| `(.*?)` \| `(.*?)` \| ``? ?(.*?) ?``? \| (.*?) \|$", table, re.MULTILINE
    )
    return {Line(file, function, text.replace("\\|", "|")): by for file, function, text, by in rows}


def write(reached: Mapping[Line, str]) -> None:
    """Write the list into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    rows = ["| file | function | line | test |", "| --- | --- | --- | --- |"]
    for line in find():
        text = line.text.replace("|", "\\|")
        if test := UNSEEN.get(line[:2]):
            reached = {line: f"`tests/unit/test_env_run.py::{test}`", **reached}
        by = reached.get(line, f"{NEVER}: {REASONS.get(line[:2], 'nobody wrote down why')}")
        rows.append(f"| `{line.file}` | `{line.function}` | `` {text} `` | {by} |")
    PAGE.write_text(before + BEGIN + "\n".join(rows) + "\n" + END + rest.partition(END)[2])


def record(words: list[str]) -> None:
    """Run tests, and write the list with what they reached beside what was known."""
    known = {line: by for line, by in read().items() if not by.startswith(NEVER)}
    lines = {(line.file, number): line for line, numbers in find().items() for number in numbers}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text("import gpu_lines\ngpu_lines.watch()\n")
        Path(folder, "lines.json").write_text(json.dumps([*lines]))
        paths = [folder, str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        place = {NOTES: folder, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        subprocess.run(["pytest", *words], cwd=ROOT, env={**os.environ, **place}, check=False)
        for note in sorted(Path(folder).glob("*.notes")):
            for row in note.read_text().splitlines():
                file, number, test = row.split("\t")
                known.setdefault(lines[file, int(number)], f"`{test}`")
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
    """Return a file of the product by its place in the checkout, without copies and links."""
    name = COPY.sub("", code.co_filename.removeprefix(f"{ROOT}/"))
    return name.removeprefix("rollcall/") if name.startswith(LINKED) else name


def _note(file: str, number: int, seen: set[tuple[str, int]]) -> None:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0].partition("[")[0]
    if test and (file, number) not in seen:
        seen.add((file, number))
        with (Path(os.environ[NOTES]) / f"{os.getpid()}.notes").open("a") as notes:
            notes.write(f"{file}\t{number}\t{test}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["record"]:
        record(sys.argv[2:])
    else:
        write(read())
