"""A new user submits from their own environment, with an installation that they may not write."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import ROOT
from disks import needs_root

from rollcall.records.run_dir import RunDir

USER = "rollcall-test"
# The administrator's env/run builds with this: the environment of the tests stands for a new one.
UV = """#!/bin/sh
case $1 in venv) ln -s {prefix} "$4" ;; esac
"""
SCRIPT = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
print("rank", dist.get_rank(), "of", dist.get_world_size(), "uid", os.getuid(), sys.prefix)
"""
# Homes are private, and here the interpreter lies in one: show others no more of it than that.
OPEN = """
set -e
for path in "$@"; do
    top=$path
    while [ "$(dirname "$top")" != / ]; do top=$(dirname "$top"); done
    [ -d "$BESIDE$top" ] || {
        case $(stat -c %A "$top") in *r-x) continue ;; esac
        mkdir -p "$BESIDE$top"
        mount --bind "$top" "$BESIDE$top"
        mount -t tmpfs -o mode=755 none "$top"
    }
    mkdir -p "$path"
    mount --bind "$BESIDE$path" "$path"
done
exec runuser -u "$NAME" -- env -i HOME="$PLACE" PATH="$SEARCHED" bash -ec "$LINES"
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that everybody may read, with the home of a new account in it."""
    with tempfile.TemporaryDirectory(prefix="rollcall-site-") as name:
        Path(name).chmod(0o755)  # pytest's own directories are private
        subprocess.run(["userdel", USER], capture_output=True)  # of a test that was killed
        add = ["useradd", "-m", "-d", f"{name}/home", USER]
        subprocess.run(add, check=True, capture_output=True)
        try:
            yield Path(name)
        finally:
            subprocess.run(["userdel", USER], check=True, capture_output=True)


def install(place: Path, tools: Path) -> Path:
    """Install a checkout for everybody, as docs/site.md says, without building an environment."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    for name in subprocess.check_output(listed, text=True).split("\0")[:-1]:
        if os.path.lexists(ROOT / name):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    git = ["git", "-C", str(place), "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    tools.mkdir()
    (tools / "uv").write_text(UV.format(prefix=sys.prefix))
    (tools / "uv").chmod(0o755)
    defaults = {"ENVS": place / "environments", "TORCH": "default", "PYTHON": sys.executable}
    (place / "site").mkdir()
    lines = [f"ROLLCALL_{name}={value}\n" for name, value in defaults.items()]
    (place / "site" / "defaults").write_text("".join(lines))
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": "/nonexistent"}
    subprocess.run([place / "env" / "run", "true"], env=env, check=True)
    return place


def three_lines(rollcall: Path) -> list[str]:
    """Return the first commands of docs/environments.md, for this installation."""
    text = (ROOT / "docs" / "environments.md").read_text()
    lines = re.findall(r"```text\n(.*?)```", text, re.DOTALL)[0].splitlines()
    assert len(lines) == 3
    return [line.replace("/opt/rollcall", str(rollcall)) for line in lines]


@needs_root
@pytest.mark.long
@pytest.mark.skipif(shutil.which("useradd") is None, reason="makes a user account")
def test_a_new_user_submits_with_three_lines(place: Path) -> None:
    rollcall, home = install(place / "opt" / "rollcall", place / "tools"), place / "home"
    make, pip, submit = three_lines(rollcall)
    assert pip.startswith("~/envs/mine/bin/pip install torch")
    [site] = Path(sys.prefix).glob("lib/python3.*/site-packages")
    # Nothing is downloaded: the torch of the tests stands for the one that pip would install.
    link = f"import site; site.addsitedir({str(site)!r})"
    pip = f"echo {shlex.quote(link)} > $(echo ~/envs/mine/lib/python3*/site-packages)/torch.pth"
    project = home / "project"
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    shutil.chown(project, USER)
    base = Path(sys.base_prefix)
    lines = ["cd ~/project", make, pip, f"{submit} >told 2>&1"]
    env = {
        "NAME": USER,
        "PLACE": str(home),
        "SEARCHED": f"{base}/bin:/usr/bin:/bin",
        "BESIDE": str(place / "beside"),
        "LINES": "\n".join(lines).replace("--nodes 2", "--nodes 2 --local --wait --name a"),
    }
    environment = Path(sys.prefix).parent
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", OPEN, "sh", str(base), str(environment)],
        env=os.environ | env,
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    told = (project / "told").read_text() if (project / "told").exists() else ""
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{told}"
    run = RunDir(project / "runs", "a")
    uid = (home / "project").stat().st_uid
    for node in (0, 1):
        said = run.log(0, node, 2 * node).read_text().splitlines()[-1]
        assert said == f"rank {2 * node} of 4 uid {uid} {home}/envs/mine"
    assert "note:" not in told, told
