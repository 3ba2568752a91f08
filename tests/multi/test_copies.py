"""Copies of rollcall: each form of it runs the code that one edits, through each of its doors."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from wheels import build_sdist, build_wheel, copy_checkout, install

pytestmark = pytest.mark.long

EDIT = '\nprint("edited:", __file__)\n'
EDITED = "train/main.py", "launch/submission/command.py"
PYTHON = sys.executable
SETTINGS = ["digits", "device=cpu", "train.steps=1", "checkpoint.every=null"]


@dataclass(frozen=True)
class Copy:
    """A copy of rollcall.

    Attributes:
        package: the directory that holds the package `rollcall`.
        doors: commands that train.
        submit: commands that submit a run.
        env: what its commands need in their environment.
        is_checkout: whether its commands are called in `package`, not in a directory of the user.
    """

    package: Path
    doors: list[list[str]]
    submit: list[list[str]]
    env: dict[str, str]
    is_checkout: bool


def _checkout(root: Path) -> Copy:
    doors = [[PYTHON, "-m", "train"], [PYTHON, "-m", "rollcall.train"]]
    doors += [[PYTHON, str(root / "env" / "bin" / "rollcall"), "train"]]
    submit = [[PYTHON, "launch/submit.py"], [PYTHON, "-m", "launch", "submit"]]
    return Copy(root, doors, submit, {}, is_checkout=True)


def _installed(package: Path, scripts: Path, python: str, env: dict[str, str]) -> Copy:
    script = [python, str(scripts / "rollcall")]
    doors = [[*script, "train"], [python, "-m", "rollcall.train"]]
    return Copy(package, doors, [[*script, "submit"]], env, is_checkout=False)


def _repository(folder: Path) -> Path:
    root = copy_checkout(folder / "clone")
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *words], check=True)
    return root


def flat(folder: Path) -> Copy:
    """`scp -r`, `cp -rL`: links are followed."""
    root = _repository(folder)
    shutil.copytree(root, folder / "flat", symlinks=False)
    return _checkout(folder / "flat")


def zipped(folder: Path) -> Copy:
    """`git archive --format=zip`, unpacked by a program that knows neither links nor modes.

    It has no folder .git, like the sdist.
    """
    archive = folder / "rollcall.zip"
    git = ["git", "-C", str(_repository(folder)), "archive", "--format=zip"]
    subprocess.run([*git, "-o", str(archive), "HEAD"], check=True)
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder / "unzipped")
    return _checkout(folder / "unzipped")


def sdist(folder: Path) -> Copy:
    """The source distribution, unpacked."""
    with tarfile.open(build_sdist(folder)) as file:
        file.extractall(folder / "unpacked", filter="data")
    [root] = (folder / "unpacked").iterdir()
    return _checkout(root)


def wheel(folder: Path) -> Copy:
    """The wheel, installed, and edited there."""
    site = install(build_wheel(folder))
    return _installed(site, site / "bin", PYTHON, {"PYTHONPATH": str(site)})


def editable(folder: Path) -> Copy:
    """`pip install -e`, in an environment that sees this one's packages."""
    venv = folder / "venv"
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", str(venv)], check=True)
    [packages] = venv.glob("lib/python*/site-packages")
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "outer.pth").write_text("\n".join(paths))
    root, python = copy_checkout(folder / "src"), str(venv / "bin" / "python")
    pip = [PYTHON, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    words = ["--no-index", "--no-build-isolation", "-e", str(root)]
    subprocess.run([*pip, *words], check=True, capture_output=True)
    return _installed(root, venv / "bin", python, {})


@pytest.mark.parametrize("make", [flat, zipped, sdist, wheel, editable])
def test_a_copy_runs_the_code_that_one_edits(tmp_path: Path, make: Callable[[Path], Copy]) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    copy = make(folder)
    assert not [path for path in copy.package.rglob("*") if path.is_symlink()]
    main, command = (copy.package / "rollcall" / path for path in EDITED)
    for path in (main, command):
        path.write_text(path.read_text() + EDIT)
    here = copy.package if copy.is_checkout else tmp_path

    def output(*words: str) -> str:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **copy.env}
        done = subprocess.run(
            words, cwd=here, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, f"{words}: {done.stdout}"
        return done.stdout

    for door in copy.doors:
        assert f"edited: {main}\n" in output(*door, "--print-config"), door
    words = ["--local", "--wait", "--nproc-per-node=1", "--name=mine", *SETTINGS]
    for submit in copy.submit:
        shown = output(*submit, "--dry-run", *words)
        assert f"edited: {command}\n" in shown and "mine" in shown, submit
    shown = output(*copy.submit[0], *words)
    assert re.search(r"edited: \S+/runs/mine/\S+/rollcall/train/main.py\n", shown), shown


def test_the_sdist_gives_the_same_wheel(tmp_path: Path) -> None:
    """As a package index's sdist does, where no wheel fits."""
    unpacked = sdist(tmp_path).package
    content = []
    for folder, source in ((tmp_path / "direct", None), (tmp_path / "through", unpacked)):
        folder.mkdir()
        with zipfile.ZipFile(build_wheel(folder, source)) as archive:
            content.append({entry.filename: entry.CRC for entry in archive.infolist()})
    assert content[0] == content[1]
