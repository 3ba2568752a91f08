"""rollcall in a user's own project: installed from its wheel, and from a checkout elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkout import ROOT
from wheels import build_wheel, install

from rollcall.records.job import Submission
from rollcall.records.run_dir import RunDir

pytestmark = pytest.mark.long

WORDS = ["device=cpu", "train.steps=2", "checkpoint.every=null", "model.name=mymodel:Net"]
LOCAL = ["--local", "--wait", "--nproc-per-node=1"]
MODEL = """
from torch import nn

import env
from launch import own
from train import build

assert (env.VALUE, own.VALUE) == (1, 2)


def Net(*_):
    return getattr(build, "build", build)(nn)
"""
BUILD = """
def build(nn):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""
LAYOUTS = [
    *(("checkout", file) for file in ("train.py", "train/__init__.py", "train/build.py")),
    ("installed", "train/build.py"),  # it has no `train` of its own that could be taken for theirs
]


@dataclass(frozen=True)
class Rollcall:
    """A rollcall that a user calls from a directory of theirs.

    Attributes:
        path: the value of PYTHONPATH.
        submit: the words that submit a run.
    """

    path: Path
    command: list[str]
    submit: list[str]

    def __call__(self, *words: str, cwd: Path) -> str:
        return self.run(*self.command, *words, cwd=cwd)

    def run(self, *words: str, cwd: Path) -> str:
        env = os.environ | {"PYTHONPATH": str(self.path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, f"{words}: {done.stdout}"
        return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel: Path) -> Rollcall:
    site = install(wheel)
    console = [str(site / "bin" / "rollcall")]
    return Rollcall(site, console, [*console, "submit"])


@pytest.fixture(params=["installed", "checkout"])
def rollcall(request: pytest.FixtureRequest) -> Rollcall:
    if request.param == "checkout":
        command = [sys.executable, str(ROOT / "env" / "bin" / "rollcall")]
        return Rollcall(ROOT, command, [sys.executable, str(ROOT / "launch" / "submit.py")])
    found: Rollcall = request.getfixturevalue("installed")
    return found


def project(place: Path, layout: str) -> Path:
    """A user's project whose files have the names of rollcall's folders."""
    (place / "launch").mkdir(parents=True)
    (place / "launch" / "own.py").write_text("VALUE = 2\n")
    (place / "env.py").write_text("VALUE = 1\n")
    (place / "mymodel.py").write_text(MODEL)
    (place / layout).parent.mkdir(exist_ok=True)
    (place / layout).write_text(BUILD)
    return place


def test_the_wheel_has_one_package_and_one_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
        [scripts] = [entry for entry in entries if entry.filename.endswith("entry_points.txt")]
        assert archive.read(scripts).decode().split() == [
            *("[console_scripts]", "rollcall", "=", "rollcall.cli.program:run")
        ]
    names = {entry.filename for entry in entries}
    assert {name.split("/")[0].partition("-")[0] for name in names} == {
        "rollcall",
        "rollcall_train",
    }
    assert all(entry.external_attr >> 28 != 0o12 for entry in entries), "a link in the wheel"
    listed = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "rollcall"]
    files = subprocess.check_output(listed, text=True).splitlines()
    assert {name for name in names if name.startswith("rollcall/")} == {
        name for name in files if not name.endswith("/README.md") and (ROOT / name).exists()
    }


@pytest.mark.parametrize(("rollcall", "layout"), LAYOUTS, indirect=["rollcall"])
def test_a_users_files_may_have_the_names_of_rollcalls(
    tmp_path: Path, rollcall: Rollcall, layout: str
) -> None:
    place = project(tmp_path / "mine", layout)
    rollcall("train", *WORDS, "run.name=console", cwd=place)
    rollcall.run(*(sys.executable, "-m", "rollcall.train", *WORDS, "run.name=module"), cwd=place)
    for name in ("console", "module"):
        verdict = RunDir(place / "runs", name).read_verdict()
        assert verdict is not None and verdict.state == "done"
    shown = rollcall("status", cwd=place)
    assert "console" in shown and "module" in shown


def submitted(place: Path, rollcall: Rollcall) -> RunDir:
    """Train a project on two ranks, submit it, and check what was copied for the job."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    rollcall.run(*torchrun, "-m", "rollcall.train", *WORDS, "run.name=two", cwd=place)
    rollcall.run(*rollcall.submit, *LOCAL, "--nodes=2", "--name=a", *WORDS, cwd=place)
    run = RunDir(place / "runs", "a")
    assert (run.code / "mymodel.py").read_text() == MODEL
    assert (run.job / "rollcall" / "rollcall" / "cli" / "commands.py").is_file()
    copied = json.loads((run.job / "source.json").read_text())
    assert set(copied["files"]) == {"mymodel.py", "env.py", "launch/own.py", "train/build.py"}
    return run


@pytest.mark.parametrize("rollcall", ["checkout"], indirect=True)
def test_a_project_is_submitted_with_a_checkout(tmp_path: Path, rollcall: Rollcall) -> None:
    submitted(project(tmp_path / "mine", "train/build.py"), rollcall)


def test_a_project_is_submitted_continued_and_reproduced(
    tmp_path: Path, installed: Rollcall
) -> None:
    """It continues with the code that it has, or with new code; and it can be made again."""
    place, rollcall = project(tmp_path / "mine", "train/build.py"), installed
    run = submitted(place, rollcall)
    (place / "mymodel.py").write_text("print('edited')\n" + MODEL)
    again = [*rollcall.submit, *LOCAL, "--name=a", "--resume"]
    assert "edited" not in rollcall.run(*again, *WORDS, "train.steps=3", cwd=place)
    assert "edited" in rollcall.run(*again, "--new-code", *WORDS, "train.steps=4", cwd=place)
    shutil.rmtree(run.path / "code-0")
    (place / "mymodel.py").unlink()
    assert "edited" in rollcall("reproduce", "a", "--local", "--wait", cwd=place)
    assert "a-again" in rollcall("status", cwd=place)
    newest = Submission.newest(RunDir(place / "runs", "a-again").path)
    assert newest is not None and newest.argv, "what `requeue` says to submit"
    assert newest.argv[-2:] == ["--local", "--name=a-again"] and WORDS[0] in newest.argv
    assert "done" in rollcall("why", "a-again", cwd=place)


def test_a_training_without_modules_of_the_user_needs_no_copy_of_their_directory(
    tmp_path: Path, rollcall: Rollcall
) -> None:
    (tmp_path / "datasets").mkdir()
    with (tmp_path / "huge.bin").open("wb") as file:
        file.truncate(10**12)
    rollcall.run(*rollcall.submit, *LOCAL, "--name=a", *WORDS[:-1], cwd=tmp_path)
    run = RunDir(tmp_path / "runs", "a")
    assert (run.code / "rollcall" / "cli" / "commands.py").is_file()
    assert not (run.code / "huge.bin").exists()


LIBRARY = """
from pathlib import Path

from rollcall import Checkpointer, Config, RunDir, StopSignals, World

reveal_type(World.join)
reveal_type(Checkpointer)
reveal_type(Config().data.global_batch)
reveal_type(RunDir("runs", "a").checkpoints)
reveal_type(StopSignals().__enter__)
world: int = World.join("cpu")
"""


def test_the_library_is_typed(tmp_path: Path, installed: Rollcall) -> None:
    """As a package of site-packages; `.ci/run` checks the checkout's own types."""
    (tmp_path / "loop.py").write_text(LIBRARY)
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\nfollow_imports = silent\n")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "loop.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed.path)},
        capture_output=True,
        text=True,
    )
    shown = [line.partition(" note: ")[2] for line in checked.stdout.splitlines()]
    types = [line.removeprefix("Revealed type is ") for line in shown if line.startswith("Rev")]
    assert len(types) == 5, checked.stdout
    assert "World" in types[0] and "str" in types[0]
    assert "Checkpointer" in types[1] and "World" in types[1]
    assert types[2] in ('"int"', '"builtins.int"')
    assert types[3] in ('"Path"', '"pathlib.Path"', '"pathlib._local.Path"')
    assert "StopSignals" in types[4]
    typed = [found.replace("dict[str, Any]", "") for found in types]  # a state dict's own type
    assert not any("Any" in found for found in typed), types
    assert 'expression has type "World"' in checked.stdout
