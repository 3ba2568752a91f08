"""The programs in examples/ run, and the page shows their differences."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from ranks import free_port

ROOT = Path(__file__).parents[2]
PHOTOS = ROOT / "examples/photos"
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
    assert sum(line.startswith("+") for line in changes()) <= 11
    recipe = (PHOTOS / "photos.yaml").read_text()
    assert f"```yaml\n{recipe}```" in page
    assert len(recipe.splitlines()) <= 8  # and nothing in the script


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The example with 45 photos of three colours; without the curves if TensorBoard is missing."""
    drawn = np.random.default_rng(0)
    for part, count in (("train", 10), ("val", 5)):
        for channel, name in enumerate(("blue", "green", "red")):
            place = tmp_path / "data" / part / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = drawn.integers(0, 160, (40, 40, 3), dtype=np.uint8)
                pixels[..., 2 - channel] += 60
                Image.fromarray(pixels).save(place / f"{number}.png")
    for path in PHOTOS.iterdir():
        if path.is_file():
            lines = path.read_text().splitlines(keepends=True)
            kept = [one for one in lines if not re.search("[wW]riter|tensorboard", one)]
            (tmp_path / path.name).write_text("".join(lines if HAS_TENSORBOARD else kept))
    return tmp_path


def run(directory: Path, *words: str, ranks: int = 1) -> str:
    """Run Python with these words on several ranks; return the output of rank 0."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}", "OMP_NUM_THREADS": "1"}
    place |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    processes = [
        subprocess.Popen(
            [sys.executable, *words],
            cwd=directory,
            env=os.environ
            | place
            | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{ranks}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    output = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(output)
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
