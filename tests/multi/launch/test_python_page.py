"""The program of docs/python.md as a notebook, in a kernel that env/run has started elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from checkout import ROOT
from pages import python_page, shown

WITH = ["--with", "nbclient,ipykernel"]
DRIVER = """
import pathlib, sys
import nbclient, nbformat
path = pathlib.Path(sys.argv[1])
notebook = nbformat.read(path, as_version=4)
nbclient.NotebookClient(notebook, timeout=500, kernel_name="python3").execute(cwd=str(path.parent))
nbformat.write(notebook, path)
"""
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def path_without_slurm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PATH with everything but sbatch."""
    place = tmp_path_factory.mktemp("bin")
    for folder in os.environ["PATH"].split(os.pathsep)[::-1]:
        for program in Path(folder).glob("*") if Path(folder).is_dir() else ():
            (place / program.name).unlink(missing_ok=True)
            (place / program.name).symlink_to(program)
    (place / "sbatch").unlink(missing_ok=True)
    return str(place)


@pytest.fixture(scope="module")
def packages() -> None:
    """Install what a notebook needs; without a network the test is skipped, but not in CI."""
    command = [str(ROOT / "env/run"), *WITH, "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    if done.returncode and "CI" not in os.environ:
        pytest.skip(f"env/run {' '.join(WITH)}: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("packages")
def test_the_page_runs_in_a_notebook(tmp_path: Path, path_without_slurm: str) -> None:
    (tmp_path / "train.py").write_text("NAME = 'mine'\n")  # not the door of rollcall
    sources = [*python_page(), "print(await both())", "import train\nprint(train.NAME)"]
    kind: dict[str, object] = {
        "cell_type": "code",
        "metadata": {},
        "outputs": [],
        "execution_count": None,
    }
    cells = [{**kind, "source": source} for source in sources]
    path = tmp_path / "page.ipynb"
    path.write_text(
        json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4})
    )
    command = [str(ROOT / "env/run"), *WITH, "python", "-c", DRIVER, str(path)]
    environment = {**os.environ, "PATH": path_without_slurm}
    environment = {name: text for name, text in environment.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = [
        output for cell in json.loads(path.read_text())["cells"] for output in cell["outputs"]
    ]
    text = "".join("".join(output.get("text", "")) for output in outputs)
    assert "this machine has no Slurm cluster, so the run starts here" in text
    assert shown(
        text.replace(
            "rollcall: note: this machine has no Slurm cluster, so the run starts here\n", ""
        )
    )
    assert text.endswith("mine\n")
