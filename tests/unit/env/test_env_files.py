"""The files of env/ for containers, conda and pixi: what they can build without these programs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from checkout import ROOT
from wheels import build_wheel, copy_checkout, install

ENV = ROOT / "env"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def dockerfile() -> list[list[str]]:
    """Return the words of each instruction."""
    lines = (ENV / "Dockerfile").read_text().splitlines()
    return [shlex.split(line) for line in lines if line and line[0] != "#"]


def apptainer(section: str) -> list[str]:
    """Return the lines of a section of the definition."""
    text = (ENV / "apptainer.def").read_text().partition(f"%{section}\n")[2]
    return [line.strip() for line in text.partition("\n%")[0].splitlines() if line.strip()]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the Dockerfile's COPY instructions fill, from a clean checkout."""
    folder = tmp_path_factory.mktemp("image")
    checkout, target = copy_checkout(folder / "src"), folder / "opt"
    target.mkdir()
    for instruction, *words in dockerfile():
        if instruction == "COPY":
            *sources, place = words
            for name in sources:
                source = checkout / name
                assert source.exists(), f"COPY {name}: no such file"
                if source.is_dir():
                    shutil.copytree(source, target / place)
                else:
                    shutil.copy(source, target / place / name)
    return target


def test_the_copied_files_make_a_rollcall_that_starts(image: Path) -> None:
    [install_words] = [words for name, *words in dockerfile() if name == "RUN"]
    assert install_words[:4] == ["python3", "-m", "pip", "install"] and install_words[-1] == "."
    site = install(build_wheel(image.parent, image))
    [command] = [words for name, *words in dockerfile() if name == "CMD"]
    program, *arguments = [word.strip("[],") for word in command]
    done = subprocess.run(
        [sys.executable, str(site / "bin" / program), *arguments],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=image.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "Usage: rollcall COMMAND" in done.stdout, done.stderr


def test_both_images_are_made_in_the_same_way() -> None:
    copied = {name for step, *words in dockerfile() if step == "COPY" for name in words[:-1]}
    assert {line.split()[0] for line in apptainer("files")} == copied
    [place] = [words[0] for step, *words in dockerfile() if step == "WORKDIR"]
    assert all(line.split()[1] == f"{place}/" for line in apptainer("files"))
    [run] = [shlex.join(words) for step, *words in dockerfile() if step == "RUN"]
    assert apptainer("post") == [f"cd {place}", run]
    base = re.search(r"(?m)^ARG BASE=(.*)$", (ENV / "Dockerfile").read_text())
    assert base and f"\nFrom: {base[1]}\n" in (ENV / "apptainer.def").read_text()
    assert allowed(base[1].removeprefix("python:").removesuffix("-slim"))


def test_conda_and_pixi_name_this_project() -> None:
    conda = yaml.safe_load((ENV / "conda.yaml").read_text())
    [python, _, packages] = conda["dependencies"]
    [option] = packages["pip"]
    assert allowed(python.removeprefix("python="))
    assert (ENV / option.removeprefix("-e ")).resolve() == ROOT
    pixi = tomllib.loads((ENV / "pixi.toml").read_text())
    [(name, package)] = pixi["pypi-dependencies"].items()
    assert name == PROJECT["name"] and (ENV / package["path"]).resolve() == ROOT
    assert allowed(pixi["dependencies"]["python"].removesuffix(".*"))


def allowed(version: str) -> bool:
    """Return True if rollcall supports this Python."""
    low, high = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    return int(low) <= int(version.removeprefix("3.")) < int(high)
