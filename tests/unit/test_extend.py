"""What CONTRIBUTING.md says of a new data set, model and optimizer: one file and one line."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

from rollcall.config.catalog import DATA_SETS
from rollcall.train.data.sets import slow_imports

EXAMPLE = re.compile(
    r"here\n?\s*`(?P<file>rollcall/train/[\w/]+\.py)`:\n\n```py\n(?P<code>.*?)```\n\n"
    r"and one line in `(?P<table>[A-Z_]+)` in `(?P<place>[\w/]+\.yaml)`:\n\n"
    r"```yaml\n(?P<line>.*?)```",
    re.DOTALL,
)
IGNORED = shutil.ignore_patterns("__pycache__")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with the examples added."""
    root = tmp_path_factory.mktemp("extend")
    for name in ("train", "rollcall", "docs"):
        shutil.copytree(ROOT / name, root / name, ignore=IGNORED)
    found = {
        match["table"]: match for match in EXAMPLE.finditer((ROOT / "CONTRIBUTING.md").read_text())
    }
    for table in ("DATA_SETS", "MODELS", "OPTIMIZERS", "LOSSES"):
        example = found[table]
        (root / example["file"]).write_text(example["code"])
        place = root / example["place"]
        before = place.read_text()
        place.write_text(before.replace(f"{table}:\n", f"{table}:\n{example['line']}"))
        assert len(place.read_text().splitlines()) == len(before.splitlines()) + 1
    return root


def run(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "train", *words],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.long
def test_a_data_set_a_model_and_an_optimizer_are_one_file_and_one_line_each(copy: Path) -> None:
    words = ["data.name=parity", "model.name=linear", "optim.name=adagrad"]
    trained = run(copy, *words, "train.steps=3", "device=cpu", "run.name=mine")
    assert trained.returncode == 0, trained.stderr
    assert "validation accuracy" in trained.stdout
    assert (copy / "runs/mine/verdict.json").exists()


@pytest.mark.parametrize(
    ("key", "name"), [("data.name", "parity"), ("model.name", "linear"), ("optim.name", "adagrad")]
)
def test_help_lists_what_was_added(copy: Path, key: str, name: str) -> None:
    assert name in run(copy, "--help", key).stdout
    assert name in run(copy, "--print-schema").stdout


@pytest.mark.long
def test_one_command_rebuilds_what_is_generated(copy: Path) -> None:
    made = [
        copy / "docs" / "reference.md",
        copy / "rollcall" / "config" / "recipes" / "schema.json",
    ]
    names = ("parity", "adagrad")
    assert not any(name in path.read_text() for path in made for name in names)
    subprocess.run([sys.executable, "docs/make.py"], cwd=copy, check=True, timeout=500)
    assert all(name in path.read_text() for path in made for name in names)


@pytest.mark.long
def test_slow_imports_are_known_without_importing_them() -> None:
    code = (
        "import sys\n"
        "from rollcall.train.data.sets import slow_imports\n"
        "assert slow_imports('cifar100') == slow_imports('mnist') == ('torchvision.datasets',)\n"
        "assert not {'sklearn', 'torchvision'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)
    assert slow_imports("text") == slow_imports("my.package:load") == ()
    assert all(isinstance(slow_imports(name), tuple) for name in DATA_SETS)
