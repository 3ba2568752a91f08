"""The first day of new users, with the commands that README and docs give them.

No command may fail, and no step may be lost.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import subprocess
import time
from pathlib import Path

import photo_files
import pytest
from checkout import ROOT
from photo_files import PHOTOS


class Journey:
    """A user's directory, and a shell in which `env/run` is the only thing of the checkout."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environ = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        self.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        # A new user: no earlier job of this machine has reported a node.
        self.environ["XDG_STATE_HOME"] = str(home / ".state")
        kept = ("ROLLCALL_ENVS", "ROLLCALL_TORCH", "ROLLCALL_PYTHON", "XDG_CACHE_HOME")
        self.environ |= {name: os.environ[name] for name in kept if name in os.environ}

    def types(self, line: str, code: int = 0) -> str:
        """Run a line that the user types after `env/run`; return what it showed."""
        done = subprocess.run(
            [str(ROOT / "env/run"), "--quiet", *shlex.split(line)],
            cwd=self.home,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == code, f"{line}\n{done.stdout}"
        assert "Traceback" not in done.stdout, done.stdout
        return done.stdout

    def losses(self, name: str) -> dict[int, float]:
        """The logged losses of a run; a step that was done twice stands once."""
        lines = (self.home / "runs" / name / "metrics.jsonl").read_text().splitlines()
        known = [json.loads(line) for line in lines]
        return {line["step"]: line["loss"] for line in known if "loss" in line}

    def state(self, name: str) -> str:
        verdict = json.loads((self.home / "runs" / name / "verdict.json").read_text())
        return str(verdict["state"])


@pytest.fixture
def user(tmp_path: Path) -> Journey:
    return Journey(tmp_path)


@pytest.fixture
def student(user: Journey) -> Journey:
    """A student with a script and 24 photos of three colours; nothing of rollcall is in it."""
    photo_files.draw(user.home, {"train": 4, "val": 4})
    for name, text in photo_files.files(has_curves=False).items():
        own = text.replace("photos:", "mine:").replace("global_batch: 16", "global_batch: 4")
        (user.home / name.replace("photos", "mine")).write_text(own)
    return user


@pytest.mark.long
def test_a_student_with_an_unmodified_script(student: Journey) -> None:
    before = {path.name for path in student.home.iterdir()}
    alone = student.types("python mine.py --epochs 2 --batch 4")
    shown = student.types(
        "rollcall submit --local --nodes 2 --nproc_per_node 2 --wait --name s "
        "-- mine.py --epochs 2 --batch 4"
    )
    assert "results of earlier runs stay behind: best.pt" in shown
    assert "4 ranks ran; none joined a process group" in shown
    assert [line for line in alone.splitlines() if line.startswith("epoch")] == [
        line for line in shown.splitlines() if line.startswith("epoch")
    ]
    assert (student.home / "runs/s/code/best.pt").exists()  # in the run
    assert "done" in student.types("rollcall status")
    assert "s has not failed" in student.types("rollcall why s")
    assert "epoch 1" in student.types("rollcall logs s --rank 3")
    assert {path.name for path in student.home.iterdir()} == before | {"best.pt", "runs"}


@pytest.mark.long
def test_a_student_by_plugins(student: Journey) -> None:
    """The recipe has six lines, the script does not change, and every start is the same run."""
    recipe = (student.home / "mine.yaml").read_text().splitlines()[1:]
    assert len(recipe) <= 8
    words = "./mine.yaml train.epochs=2 log.every=1"
    student.types(f"torchrun --nproc_per_node=2 -m train {words} run.name=two")
    shown = student.types(
        f"rollcall submit --nodes 2 --nproc-per-node 1 --wait --local --name three {words}"
    )
    assert "done: 6 steps trained" in shown
    losses = student.losses("two")
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    assert student.losses("three") == pytest.approx(losses, rel=1e-5)
    assert student.state("two") == student.state("three") == "done"
    # The same name on one rank continues after the last step of two ranks.
    assert "7/9" in student.types(f"rollcall train {words} run.name=two train.epochs=3")


@pytest.mark.long
def test_a_student_stops_a_run_and_continues_it(student: Journey) -> None:
    """No step is lost or done twice, and the losses are those of a run that nobody stopped."""
    words = "./mine.yaml train.epochs=20 train.stop_after=null log.every=1"
    submit = f"rollcall submit --local --nproc-per-node 2 --name n {words}"
    student.types(submit)
    deadline = time.monotonic() + 500
    metrics = student.home / "runs/n/metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count('"loss"') < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    student.types("rollcall cancel n")
    while not (student.home / "runs/n/verdict.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert student.state("n") == "stopped"
    student.types("rollcall why n")
    before = max(student.losses("n"))
    assert "done: 60 steps trained" in student.types(f"{submit} --wait")
    assert before < 60 and sorted(student.losses("n")) == [*range(1, 61)]
    assert not (student.home / "runs/n/forgotten.jsonl").exists()
    student.types(f"rollcall train --ranks 2 {words} run.name=undisturbed")
    assert student.losses("n") == pytest.approx(student.losses("undisturbed"), rel=1e-6)


@pytest.mark.long
def test_a_student_by_the_library(student: Journey) -> None:
    before, after = (
        (PHOTOS / name).read_text().splitlines() for name in ("photos.py", "photos_library.py")
    )
    changed = [line for line in difflib.ndiff(before, after) if re.match(r"\+ .", line)]
    assert len(changed) <= 8
    shown = student.types("torchrun --nproc_per_node=2 mine_library.py --epochs 2 --batch 4")
    assert shown.count("epoch ") == 2  # rank 0 prints for both
    shown = student.types(
        "rollcall submit --local --wait --nproc-per-node 2 --name l "
        "-- mine_library.py --epochs 2 --batch 4"
    )
    assert shown.count("epoch ") == 2 and "none joined" not in shown
    assert (student.home / "runs/l/code/best.pt").exists()


@pytest.mark.long
def test_sweeps_and_figures(user: Journey) -> None:
    (user.home / "lr.yaml").write_text(
        "program: [digits, train.steps=4, log.every=1, device=cpu, model.name=mlp]\n"
        "grid: {seed: [0, 1]}\nthrottle: 2\nsort: val_accuracy\n"
    )
    assert "2 of 2 cells" in user.types("rollcall sweep submit --dry-run lr.yaml")
    assert not (user.home / "runs").exists()
    user.types("rollcall sweep submit --local lr.yaml")
    deadline = time.monotonic() + 500
    while len(list(user.home.glob("runs/lr/*/verdict.json"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    table = user.types("rollcall sweep status lr.yaml --csv cells.csv")
    assert table.count(" done ") == 2
    assert len((user.home / "cells.csv").read_text().splitlines()) == 3
    assert "best validation accuracy: seed-" in user.types("rollcall compare lr")
    assert "2 runs" in user.types("rollcall report lr")
    page = (user.home / "report-lr.html").read_text()
    assert "one standard deviation over the seeds" in page
    user.types("rollcall report lr --over seed --log --figure loss.pdf")
    assert (user.home / "loss.pdf").read_bytes().startswith(b"%PDF")


def test_an_administrator(user: Journey) -> None:
    """The commands of docs/site.md and docs/doctor.md that need no cluster."""
    assert re.search(r"\d+ ok,.* not applicable", user.types("rollcall doctor --quick"))
    assert "no node has failed" in user.types("rollcall nodes")
    profiles = user.home / "site/clusters"
    profiles.mkdir(parents=True)
    (profiles / "hill.yaml").write_text("options: {nproc-per-node: 2, root: shared}\n")
    user.environ["ROLLCALL_SITE"] = str(user.home / "site")
    shown = user.types("rollcall submit --local --cluster hill --dry-run digits")
    assert f"--run-dir {user.home}/shared/digits-" in shown and "--nproc-per-node 2" in shown
    assert not (user.home / "runs").exists()
