"""Every command in the README and the docs works when it is typed at the root of a checkout."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from checkout import ROOT, SHORT_TEXT
from lab import Lab

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])
# .ci/run types the tests; test_doctor_lab.py types the acceptance on two hosts.
TESTS = re.compile(r"(ROLLCALL_TORCH=\S+ )?\./env/run (pytest\b|rollcall accept --nodes 2$)")
# test_launchers.py trains the default recipe to its end, test_doctor_lab.py makes all checks.
FIRST_STEPS = (
    "./env/run torchrun --nproc_per_node=4 -m train",
    "./env/run python launch/submit.py --nodes 2 --wait",
    "sbatch --nodes=2 slurm/multi_node.sbatch",
    "srun -N2 --ntasks-per-node=2 ./env/run --quiet python -m train",
)
SHORTER = dict.fromkeys(FIRST_STEPS, " train.steps=20")
SHORTER["./env/run rollcall accept"] = " -- --only machine,memory"
GPT = re.compile(r" train gpt (?!.*data\.path)")
"""Commands that would spend most of their time on validating the whole standard library."""
MANY_STEPS = re.compile(r" train gpt .*train\.steps=300\b")
"""Commands whose pages quote the losses of so many steps; the last value of a key counts."""


def commands() -> dict[str, str]:
    """Each command, after the page on which it stands first; a later page may build on that."""
    found: dict[str, str] = {}
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.splitlines():
                if line and not line.startswith("# ") and not TESTS.match(line):
                    found.setdefault(line, f"{page.name}: {line}")
    return found


def typed(command: str) -> str:
    """Return what the test types: the command, some with less to compute."""
    more = [SHORTER.get(command, "")]
    more += [f" {SHORT_TEXT}"] if GPT.search(command) else []
    more += [" train.steps=40"] if MANY_STEPS.search(command) else []
    return command + "".join(more)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout on the lab's shared file system, for the runs that this leaves."""
    copy = tmp_path_factory.mktemp("docs") / "rollcall"
    listed = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split():
        if not (ROOT / name).exists():
            continue  # deleted, and not yet committed
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    subprocess.run(["git", "init", "-q", str(copy)], check=True)
    return copy


@pytest.mark.parametrize("command", commands(), ids=commands().values())
def test_command_works(lab: Lab, checkout: Path, command: str) -> None:
    done = lab.exec("login", "bash", "-c", typed(command), cwd=checkout, timeout=500)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for job in re.findall(r"Submitted batch job (\d+)", done.stdout):
        state = lab.wait_job(job, timeout=500)
        assert state == "COMPLETED", (checkout / f"slurm-{job}.out").read_text()


def test_there_are_commands_and_the_first_two_are_known() -> None:
    text = (ROOT / "README.md").read_text()
    first = text[text.index("```bash\n") + 8 :].splitlines()[:2]
    assert first == ["./env/run torchrun --nproc_per_node=4 -m train", "./env/run pytest"]
    assert len(commands()) > 8 and commands().keys() >= SHORTER.keys()
    shortened = [command for command in commands() if typed(command) != command]
    assert len(shortened) > len(SHORTER) + 5 and any(map(MANY_STEPS.search, shortened))
