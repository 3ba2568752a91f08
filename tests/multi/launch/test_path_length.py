"""The path from `launch/submit.py` to a rank's first line: how much code a reader must follow.

`python tests/multi/launch/test_path_length.py [checkout]` prints the figures of any checkout.
"""

import ast
import collections
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TRACER = ROOT / "tests" / "helpers" / "tracer"
ROOMS = ("rollcall/launch/", "rollcall/cli/")
"""The rooms on the path; what they call elsewhere (records, files, the schema) are libraries."""
MOST_LINES, MOST_FILES = 2460, 39
"""Bounds with a little room: which process is first, and what it has to show, differs from run to
run, by some 60 lines."""


def path(checkout: Path, folder: Path) -> tuple[dict[str, int], int]:
    """Return the lines of the functions that a submission runs, by file, and their number."""
    target, run = folder / "executed", folder / "runs" / "traced"
    command = [sys.executable, "launch/submit.py", "--local", "--nodes", "2", "--name", "traced"]
    words = ["--root", str(run.parent), "digits", "train.steps=1"]
    env = {**os.environ, "EXECUTED": str(target), "PYTHONPATH": str(TRACER)}
    subprocess.run([*command, *words], cwd=checkout, env=env, check=True, capture_output=True)
    deadline = time.monotonic() + 500
    while not (run / "verdict.json").exists():
        assert time.monotonic() < deadline, f"no verdict in {run}"
        time.sleep(0.2)
    lines: collections.Counter[str] = collections.Counter()
    executed = {line.rpartition(":")[::2] for line in target.read_text().splitlines()}
    functions = 0
    for file in {file for file, _ in executed if file.startswith(ROOMS)}:
        for node in ast.walk(ast.parse((checkout / file).read_text())):
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if (file, str(first)) in executed:
                    lines[file] += (node.end_lineno or first) - first + 1
                    functions += 1
    return lines, functions


@pytest.mark.long
def test_a_submission_runs_little_code_on_its_way_to_the_ranks(tmp_path: Path) -> None:
    lines, functions = path(ROOT, tmp_path)
    assert functions > 100, "the tracer has seen too little"
    assert sum(lines.values()) <= MOST_LINES
    assert len(lines) <= MOST_FILES


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        lines, functions = path(Path(sys.argv[1] if sys.argv[1:] else ROOT), Path(folder))
    print(f"{sum(lines.values())} lines, {len(lines)} files, {functions} functions")
