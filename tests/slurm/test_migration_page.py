"""The lines of docs/migration.md work when they are typed in a lab."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from checkout import ROOT
from lab import Lab

TRAIN = """
import os, sys
rank, local = os.environ["RANK"], os.environ["LOCAL_RANK"]
assert os.environ.get("SLURM_PROCID", rank) == rank, os.environ["SLURM_PROCID"]
assert os.environ.get("SLURM_LOCALID", local) == local, os.environ["SLURM_LOCALID"]
print("arguments", *sys.argv[1:])
"""
# What docs/migration.md leaves out or says of a larger cluster, and the same in the lab.
IN_LAB = {"submit ... -- ": "submit --local -- ", "submit ...": "submit --local -- train.py"}
IN_LAB |= {"NAME=VALUE": "NAME=value", "partition gpu": "partition main", "host1": "n1"}
IN_LAB |= {"time 120": "time 9", "time 60": "time 9", " RUN": " first"}


def translations() -> list[str]:
    """The lines of docs/migration.md for rollcall, each as somebody would type it in the lab."""
    page = (ROOT / "docs" / "migration.md").read_text()
    cells = [line.rpartition(" | ")[2] for line in page.splitlines() if line.startswith("|")]
    lines = [text for cell in cells for text in re.findall(r"`((?:NAME|rollcall |--).*?)`", cell)]
    for there, here in IN_LAB.items():
        lines = [line.replace(there, here) for line in lines]
    lines = [f"rollcall submit {line} -- train.py" if line[:2] == "--" else line for line in lines]
    whole = [line for line in lines if re.search(r"-- |status|first|values.yaml", line)]
    return list(dict.fromkeys(whole))


def typed(lab: Lab, line: str, place: Path) -> subprocess.CompletedProcess[str]:
    line = line.replace("rollcall ", f"{ROOT}/env/run --quiet rollcall ", 1)
    line = line.replace(" submit -", " submit --wait -")
    return lab.exec("login", "bash", "-c", line, cwd=place, timeout=500)


@pytest.fixture(scope="module")
def project(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script, a module, a sweep, and a run `first`, which has ended."""
    place = tmp_path_factory.mktemp("project")
    (place / "package").mkdir()
    for name in ("train.py", "package/train.py"):
        (place / name).write_text(TRAIN)
    (place / "values.yaml").write_text("program: ['--', train.py]\ngrid: {lr: [1, 2]}\n")
    done = typed(lab, "rollcall submit --local --name first -- train.py", place)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return place


@pytest.mark.parametrize("line", translations())
def test_a_line_of_the_migration_page_works(lab: Lab, project: Path, line: str) -> None:
    done = typed(lab, line, project)
    expected = 2 if "cancel first" in line else 0
    assert done.returncode == expected, f"{done.stdout}\n{done.stderr}"
    if line.endswith("--lr 0.1"):
        assert "arguments --lr 0.1" in done.stdout
    for job in re.findall(r"job (\d+)", done.stdout):
        assert lab.wait_job(job) == "COMPLETED"


def test_there_are_lines() -> None:
    assert len(translations()) > 12
