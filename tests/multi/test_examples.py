"""The programs in examples/ run, and the page shows their differences."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import photo_files
import pytest
from checkout import ROOT
from photo_files import PHOTOS
from ranks import FORKSERVER

from rollcall.system.hosts import free_port

HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None


def changes() -> list[str]:
    """The changed lines of the script that uses the library."""
    before, after = (
        (PHOTOS / name).read_text().splitlines() for name in ("photos.py", "photos_library.py")
    )
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    return [line for line in lines if not line.startswith("@@") and line not in ("+", "-")]


def test_the_page_shows_the_changes_of_both_ways() -> None:
    page = (ROOT / "docs/from-your-script.md").read_text()
    [shown] = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    assert shown.splitlines() == changes()
    assert sum(line.startswith("+") for line in changes()) <= 8
    recipe = (PHOTOS / "photos.yaml").read_text()
    assert f"```yaml\n{recipe}```" in page
    assert len(recipe.splitlines()) <= 8  # and nothing in the script
    lines = "".join(recipe.splitlines(keepends=True)[1:])
    assert f"```yaml\n{lines}```" in (ROOT / "README.md").read_text()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The example with 45 photos of three colours; without the curves if TensorBoard is missing."""
    photo_files.draw(tmp_path, {"train": 10, "val": 5})
    for name, text in photo_files.files(has_curves=HAS_TENSORBOARD).items():
        (tmp_path / name).write_text(text)
    return tmp_path


def be_python(directory: Path, words: list[str], env: dict[str, str]) -> None:
    """Run Python with these words, in a fork of a process that has imported torch."""
    os.environ.update(env)
    os.chdir(directory)
    file = os.open(f"said-{env['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    is_module = words[0] == "-m"
    sys.argv[:], sys.path[0] = words[is_module:], str(directory)
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def run(directory: Path, *words: str, ranks: int = 1) -> str:
    """Run Python with these words on several ranks; return the output of rank 0."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}", "WORLD_SIZE": f"{ranks}"}
    processes = [
        FORKSERVER.Process(
            target=be_python,
            args=(directory, list(words), place | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}),
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(500)
    output = [(directory / f"said-{rank}").read_text() for rank in range(ranks)]
    assert [process.exitcode for process in processes] == [0] * ranks, "\n".join(output)
    return output[0]


def test_one_script_is_brought_over_three_ways(project: Path) -> None:
    alone = run(project, "photos.py", "--epochs", "3")
    assert alone.count("epoch ") == 3 and (project / "best.pt").exists()
    (project / "best.pt").unlink()
    shared = run(project, "photos_library.py", "--epochs", "3", ranks=2)
    assert shared.count("epoch ") == 3 and (project / "best.pt").exists()
    words = ["-m", "rollcall", "train", "./photos.yaml", "run.name=photos", "device=cpu"]
    run(project, *words)
    verdict = json.loads((project / "runs/photos/verdict.json").read_text())
    assert verdict["state"] == "done"
    assert verdict["reason"].endswith("accuracy has not improved in 5 evaluations")
    assert (project / "runs/photos/tensorboard").exists() is HAS_TENSORBOARD


def test_a_loop_of_your_own_resumes_on_other_ranks(tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples/gan.py", tmp_path)
    script = tmp_path / "gan.py"
    text = script.read_text()
    script.write_text(text.replace("NOISE = 20", "NOISE = 2"))
    assert "epoch 2 radius" in run(tmp_path, "gan.py", ranks=2)
    script.write_text(text.replace("NOISE = 20", "NOISE = 3"))
    again = run(tmp_path, "gan.py")
    assert "epoch 3 radius" in again and "epoch 2" not in again


@pytest.mark.long
def test_two_networks_train_by_a_recipe(tmp_path: Path) -> None:
    for name in ("gan.py", "gan.yaml"):
        shutil.copy(ROOT / "examples/digits_gan" / name, tmp_path)
    words = ["-m", "rollcall", "train", "./gan.yaml", "run.name=gan", "device=cpu", "log.every=3"]
    run(tmp_path, *words, "train.steps=3", ranks=2)
    output = run(tmp_path, *words, "train.steps=6", "parallel.strategy=zero3", ranks=2)
    assert "loss_critic" in output and "loss_generator" in output
    names = [path.name for path in sorted((tmp_path / "runs/gan/samples").iterdir())]
    assert names == ["step-00000003.png", "step-00000006.png"]
