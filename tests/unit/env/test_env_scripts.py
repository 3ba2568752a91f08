"""The scripts of env/ beside env/run: staging, wheelhouse, module."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT
from wheels import wheel

ENV = ROOT / "env"
PROJECT = """[project]
dependencies = ["torch>=1", "torchvision", "pydantic"]
optional-dependencies = {dev = [], report = ["tiny"]}
"""


def run(*words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ROLLCALL_TORCH": "", **environ}  # these tests may run with an older torch
    return subprocess.run([*map(str, words)], env=env, capture_output=True, text=True, timeout=500)


def needs(program: str) -> None:
    """Skip the test if a program is missing, but not in CI."""
    if shutil.which(program) is None and "CI" not in os.environ:
        pytest.skip(f"{program} is not installed")


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "sqsh"])
def test_a_host_unpacks_once_and_again_what_has_changed(kind: str, tmp_path: Path) -> None:
    if kind == "sqsh":
        needs("mksquashfs")
    stage, packed, place = ENV / "stage", tmp_path / f"e.{kind}", tmp_path / "disk" / "e"
    (tmp_path / "e" / "bin").mkdir(parents=True)
    (tmp_path / "e" / "bin" / "python").symlink_to(sys.executable)
    for version in ("1", "second"):
        (tmp_path / "e" / "version").write_text(version)
        assert run(stage, "pack", tmp_path / "e", packed).returncode == 0
        words = [str(stage), "unpack", str(packed), str(place)]
        started = [subprocess.Popen(words) for _ in range(4)]
        assert [process.wait(500) for process in started] == [0, 0, 0, 0]
        assert (place / "version").read_text() == version
        assert (place / "bin" / "python").readlink() == Path(sys.executable)
        before = place.stat().st_ino
        assert run(*words).returncode == 0 and place.stat().st_ino == before
    left = {path.name for path in place.parent.iterdir()}
    assert left == {"e", "e.lock", "e.staged"}


def test_what_staging_refuses(tmp_path: Path) -> None:
    stage = ENV / "stage"
    (tmp_path / "mine").mkdir()
    (tmp_path / "bad.tar").write_text("no archive")
    for words, text in (
        (["pack", tmp_path / "none", tmp_path / "e.tar"], "none: no such directory"),
        (["pack", tmp_path, tmp_path / "e.zip"], "expected a name that ends in .tar"),
        (["unpack", tmp_path / "none.tar", tmp_path / "e"], "none.tar: no such file on"),
        (["unpack", tmp_path / "bad.tar", tmp_path / "mine"], "env/stage did not make it"),
        (["unpack", tmp_path / "bad.tar", tmp_path / "e"], "bad.tar cannot be unpacked in"),
        (["job", tmp_path / "none.tar", tmp_path / "e"], "none.tar: no such file"),
        (["pack"], "usage: env/stage pack"),
        (["pack", tmp_path, tmp_path / "e.tar", "more"], "pack takes two words, but got 3: "),
        (["unpack", tmp_path / "bad.tar", tmp_path / "e", "more"], "unpack takes two words"),
    ):
        done = run(stage, *words)
        assert done.returncode != 0 and text in done.stderr, done
    assert not (tmp_path / "e").exists() and not (tmp_path / "e.part").exists()


@pytest.mark.long
def test_a_wheelhouse_has_all_that_is_needed_without_a_network(tmp_path: Path) -> None:
    registry, folder = tmp_path / "registry", tmp_path / "wheels"
    for name in ("torchvision", "sympy", "pydantic", "tiny"):
        wheel(registry, name)
    wheel(registry, "torch", needs="sympy")
    shutil.copytree(ENV, tmp_path / "checkout" / "env")
    (tmp_path / "checkout" / "pyproject.toml").write_text(PROJECT)
    script = tmp_path / "checkout" / "env" / "wheelhouse"
    alone = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "ROLLCALL_PYTHON": sys.executable}
    done = run(script, folder, **alone, PIP_FIND_LINKS=str(registry))
    assert done.returncode == 0, done.stderr
    assert f"PIP_NO_INDEX=1 PIP_FIND_LINKS={folder}" in done.stdout
    pip = [sys.executable, "-m", "pip", "install", "--target", tmp_path / "site", "torch", "tiny"]
    installed = run(*pip, **alone, PIP_FIND_LINKS=str(folder))
    assert "sympy-1.0" in installed.stdout, installed.stderr
    wrong = run(script, folder, **alone, ROLLCALL_TORCH="fast")
    assert wrong.returncode != 0 and "env/wheelhouse: ROLLCALL_TORCH=fast: expected" in wrong.stderr


def test_the_module_puts_rollcall_on_path() -> None:
    lmod = Path("/usr/share/lmod/lmod/init/bash")
    if not lmod.exists() and "CI" not in os.environ:
        pytest.skip("Lmod is not installed")
    lines = f"source {lmod}; module use {ENV}/modules; module load rollcall; command -v rollcall"
    done = run("bash", "-c", lines)
    assert done.stdout.strip() == f"{ENV}/modules/bin/rollcall", done.stderr
    shown = run("bash", "-c", f"{lines} >/dev/null; rollcall submit --help")
    assert "usage: rollcall submit" in shown.stdout, shown.stderr
