"""Every Python file of the project is read by ruff and by mypy, in whatever folder it lies."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from checkout import ROOT
from mypy.main import process_options

MISTAKES = 'import os\n\nname: int = "a"\n'  # the import is for ruff, the type for mypy


def tracked() -> set[Path]:
    listed = ["git", "-C", str(ROOT), "ls-files", "*.py"]
    names = subprocess.check_output(listed, text=True).splitlines()
    return {Path(name) for name in names if (ROOT / name).exists()}


def test_ruff_reads_every_tracked_file() -> None:
    shown = subprocess.check_output(["ruff", "check", "--show-files"], cwd=ROOT, text=True)
    assert tracked() <= {Path(name).relative_to(ROOT) for name in shown.splitlines()}


def test_mypy_reads_every_tracked_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sources, _ = process_options([])
    assert tracked() <= {Path(source.path) for source in sources if source.path}


def test_both_find_a_mistake_in_every_folder(tmp_path: Path) -> None:
    """A tool that skips folders with some names, such as dist or build, would find none there."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    folders = {path.parent for path in tracked()}
    planted = {folder / f"planted_in_{'_'.join(folder.parts)}.py" for folder in folders}
    top = {"rollcall", "train", "launch", "tests", "env", "docs", "examples"}
    assert top <= {folder.parts[0] for folder in folders}
    for path in planted:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(MISTAKES)
    for command in (
        ["ruff", "check", "--output-format=concise"],
        ["mypy", "--cache-dir=/dev/null"],
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        named = {Path(name) for name in re.findall(r"^(\S+\.py):\d+:", done.stdout, re.MULTILINE)}
        assert named == planted, done.stdout + done.stderr
