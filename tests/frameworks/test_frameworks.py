"""Scripts of other frameworks on two nodes of the lab: preempted, they end as if undisturbed.

The scripts are code blocks of docs/frameworks.md, which also says how to install the frameworks in
a separate folder. A framework that is not installed is skipped.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Lab, running_lab, wait_until

from rollcall.records.job import Submission
from rollcall.run_dir import RunDir

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "frameworks.md").read_text()
# Makes a step take long enough, and counts the steps.
SLOW = """
import itertools, time
import torch.nn.functional
_loss, _steps = torch.nn.functional.mse_loss, itertools.count(1)
def _slow(*args, **kwargs):
    time.sleep(0.3)
    print("step", next(_steps), flush=True)
    return _loss(*args, **kwargs)
torch.nn.functional.mse_loss = _slow
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A cluster of two hosts, which see the folders of the frameworks."""
    folders = [Path.cwd(), *map(Path, os.environ.get("PYTHONPATH", "").split(":")), Path("/tmp")]
    below_tmp = [path for path in folders if Path("/tmp") in path.resolve().parents]
    shares = [word for path in {Path(*path.resolve().parts[:3]) for path in below_tmp}
              for word in ("--share", str(path))]  # fmt: skip
    with running_lab(f"frameworks-{os.getpid()}", "--nodes", "2", *shares) as lab:
        yield lab


@pytest.fixture
def place(lab: Lab) -> Iterator[Path]:
    """A directory that the hosts see, too."""
    made = Path(lab.output("login", "mktemp", "-d", "-p", str(Path.home())))
    yield made
    shutil.rmtree(made)


def script(name: str) -> str:
    """The code block of the page that begins with this name."""
    found = re.search(rf"```python\n(# {name}\n.*?)```", PAGE, re.DOTALL)
    assert found, f"docs/frameworks.md has no {name}"
    return found[1]


def submit(lab: Lab, place: Path, name: str, *words: str) -> RunDir:
    command = [sys.executable, str(ROOT / "launch" / "submit.py"), "--nodes=2", f"--name={name}"]
    done = lab.exec("login", *command, *words, cwd=place, timeout=280)
    run = RunDir(place / "runs", name)
    logs = [path.read_text()[-3000:] for path in run.path.glob("logs/*/*/rank-*.log")]
    assert done.returncode == 0, "\n".join([done.stdout[-3000:], done.stderr, *logs])
    return run


def last_line(run: RunDir, attempt: int) -> str:
    found = re.findall(r"^weights .*$", run.log(attempt, 0, 0).read_text(), re.MULTILINE)
    return str(found[-1])


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("lightning_script.py", "lightning"),
        ("trainer_script.py", "transformers"),
        ("accelerate_script.py", "accelerate"),
        ("deepspeed_script.py", "deepspeed"),
    ],
)
def test_a_preempted_script_ends_as_an_undisturbed_one(
    lab: Lab, place: Path, name: str, package: str
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    (place / name).write_text(SLOW + script(name))
    plain = submit(lab, place, "plain", "--nproc-per-node=1", "--wait", "--", name)
    run = submit(lab, place, "preempted", "--nproc-per-node=1", "--", name)
    log = run.log(0, 0, 0)
    wait_until(
        lambda: log.exists() and "step 10\n" in log.read_text(), 120, lambda: "it does not train"
    )
    urgent = ["--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
    job = lab.output("login", "sbatch", *urgent, "--wrap", "sleep 300")
    wait_until(lambda: "Restarts=1" in queue(lab, run), 120, lambda: "it is not preempted")
    lab.output("login", "scancel", job)
    wait_until(lambda: is_done(run), 200, lambda: f"it is {run.read_verdict()}")
    assert last_line(run, 1) == last_line(plain, 0)
    steps = run.log(1, 0, 0).read_text().count("step ")
    assert 0 < steps < plain.log(0, 0, 0).read_text().count("step ")


def queue(lab: Lab, run: RunDir) -> str:
    job = Submission.read(run.path)[-1].job
    return lab.output("login", "scontrol", "--oneliner", "show", "job", job)


def is_done(run: RunDir) -> bool:
    verdict = run.read_verdict()
    return verdict is not None and verdict.state == "done"


@pytest.mark.parametrize("name", ["test_script", "test_sync", "test_distributed_data_loop"])
def test_scripts_that_accelerate_ships(lab: Lab, place: Path, name: str) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    module = f"accelerate.test_utils.scripts.{name}"
    run = submit(lab, place, name.replace("_", "-"), "--wait", "--", "-m", module)
    assert is_done(run)


@pytest.mark.parametrize(
    ("name", "package", "told"),
    [
        ("jax_script.py", "jax", "4 processes, sum 6"),
        ("tensorflow_script.py", "tensorflow", "4 replicas"),
        ("mpi_script.py", "mpi4py", "4 processes, sum 6"),
    ],
)
def test_ranks_meet(lab: Lab, place: Path, name: str, package: str, told: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    (place / name).write_text(script(name))
    # JAX on CPUs looks up its own host's name, which the lab maps to 127.0.1.1.
    where = [] if package == "tensorflow" else ["--local"]
    run = submit(lab, place, "ranks", *where, "--wait", "--", name)
    for rank in range(4):
        assert told in run.log(0, rank // 2, rank).read_text()
