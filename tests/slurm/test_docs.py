"""Every command in the README and the docs works when it is typed at the root of a checkout."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from lab import Lab

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])
# These run the tests: .ci/run types them.
TESTS = re.compile(r"(ROLLCALL_TORCH=\S+ )?\./env/run pytest\b")


def commands() -> list[str]:
    blocks = [re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL) for page in PAGES]
    lines = [line for page in blocks for block in page for line in block.splitlines() if line]
    return [line for line in dict.fromkeys(lines) if not TESTS.match(line)]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout on the lab's shared file system, for the runs that this leaves."""
    copy = tmp_path_factory.mktemp("docs") / "rollcall"
    listed = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split():
        if not (ROOT / name).exists():
            continue  # deleted, and not yet committed
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    subprocess.run(["git", "init", "-q", str(copy)], check=True)
    return copy


@pytest.mark.parametrize("command", commands())
def test_command_works(lab: Lab, checkout: Path, command: str) -> None:
    done = lab.exec("login", "bash", "-c", command, cwd=checkout, timeout=240)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for job in re.findall(r"Submitted batch job (\d+)", done.stdout):
        state = lab.wait_job(job, timeout=120)
        assert state == "COMPLETED", (checkout / f"slurm-{job}.out").read_text()


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
    return lab.exec("login", "bash", "-c", line, cwd=place, timeout=240)


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


def test_there_are_commands_and_the_first_two_are_known() -> None:
    text = (ROOT / "README.md").read_text()
    first = text[text.index("```bash\n") + 8 :].splitlines()[:2]
    assert first == ["./env/run torchrun --nproc_per_node=4 -m train", "./env/run pytest"]
    assert len(commands()) > 8 and len(translations()) > 12
