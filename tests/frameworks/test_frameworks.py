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
from checkout import ROOT
from lab import Lab, running_lab, wait_until

from rollcall.records.job import Submission
from rollcall.records.run_dir import RunDir

PAGE = (ROOT / "docs" / "frameworks.md").read_text()
# Counts the steps, and makes each of them take a while.
COUNT = """
import itertools, time
{imports}
_call, _steps = {place}, itertools.count(1)
def _slow(*args, **kwargs):
    time.sleep({seconds})
    print("step", next(_steps), flush=True)
    return _call(*args, **kwargs)
{place} = _slow
"""
TORCH = ("import torch.nn.functional", "torch.nn.functional.mse_loss")
JAX = ("from jax.experimental import multihost_utils", "multihost_utils.process_allgather")
HANDLER = "tensorflow.distribute.experimental.PreemptionCheckpointHandler.run"
PACKAGES = ("accelerate", "deepspeed", "jax", "lightning", "mpi4py", "tensorflow", "transformers")
STEPS = 40
"""Of each script on two ranks; one that trains alone on all of the data needs more."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A cluster of two hosts, which see the folders of the frameworks."""
    if not any(map(importlib.util.find_spec, PACKAGES)):
        pytest.skip("no framework is installed; docs/frameworks.md shows how")
    folders = [Path.cwd(), *map(Path, os.environ.get("PYTHONPATH", "").split(":")), Path("/tmp")]
    below_tmp = [path for path in folders if Path("/tmp") in path.resolve().parents]
    shares = [word for path in {Path(*path.resolve().parts[:3]) for path in below_tmp}
              for word in ("--share", str(path))]  # fmt: skip
    with running_lab(f"frameworks-{os.getpid()}", "--nodes", "2", *shares) as lab:
        # JAX on CPUs looks up its own host's name, which Debian's installer maps to 127.0.1.1.
        for node in ("n1", "n2"):
            address = lab.output("login", "getent", "hosts", node).split()[0]
            lab.output(node, "sh", "-c", f"sed s/127.0.1.1/{address}/ /etc/hosts >/tmp/hosts")
            lab.output(node, "cp", "/tmp/hosts", "/etc/hosts")
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
    done = lab.exec("login", *command, *words, cwd=place, timeout=500)
    run = RunDir(place / "runs", name)
    logs = [path.read_text()[-3000:] for path in run.path.glob("logs/*/*/rank-*.log")]
    assert done.returncode == 0, "\n".join([done.stdout[-3000:], done.stderr, *logs])
    return run


def last_line(run: RunDir, attempt: int) -> str:
    found = re.findall(r"^weights .*$", run.log(attempt, 0, 0).read_text(), re.MULTILINE)
    return str(found[-1])


@pytest.mark.timeout(900)  # DeepSpeed compiles an extension first
@pytest.mark.parametrize(
    ("name", "package", "counted"),
    [
        ("lightning_script.py", "lightning", TORCH),
        ("trainer_script.py", "transformers", TORCH),
        ("accelerate_script.py", "accelerate", TORCH),
        ("deepspeed_script.py", "deepspeed", TORCH),
        ("jax_script.py", "jax", JAX),
        ("tensorflow_script.py", "tensorflow", ("import tensorflow", HANDLER)),
    ],
)
def test_a_preempted_script_ends_as_an_undisturbed_one(
    lab: Lab, place: Path, name: str, package: str, counted: tuple[str, str]
) -> None:
    need(package)
    names = {"imports": counted[0], "place": counted[1]}
    (place / name).write_text(COUNT.format(seconds=0, **names) + script(name))
    plain = submit(lab, place, "plain", "--nproc-per-node=1", "--wait", "--", name)
    assert plain.log(0, 0, 0).read_text().count("step ") == STEPS
    (place / name).write_text(COUNT.format(seconds=0.5, **names) + script(name))
    run = submit(lab, place, "preempted", "--nproc-per-node=1", "--", name)
    log = run.log(0, 0, 0)
    wait_until(
        lambda: log.exists() and "step 6\n" in log.read_text(), 180, lambda: "it does not train"
    )
    urgent = ["--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
    job = lab.output("login", "sbatch", *urgent, "--wrap", "sleep 300")
    wait_until(lambda: "Restarts=1" in queue(lab, run), 500, lambda: "it is not preempted")
    lab.output("login", "scancel", job)
    wait_until(lambda: is_done(run), 500, lambda: f"it is {run.read_verdict()}")
    assert last_line(run, 1) == last_line(plain, 0)
    assert 0 < run.log(1, 0, 0).read_text().count("step ") < STEPS


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def queue(lab: Lab, run: RunDir) -> str:
    job = Submission.read(run.path)[-1].job
    return lab.output("login", "scontrol", "--oneliner", "show", "job", job)


def is_done(run: RunDir) -> bool:
    verdict = run.read_verdict()
    return verdict is not None and verdict.state == "done"


def test_tensorflow_trains_with_parameter_servers(lab: Lab, place: Path) -> None:
    need("tensorflow")
    (place / "parameter_servers.py").write_text(script("parameter_servers.py"))
    roles = "--roles=chief,ps,worker:3,evaluator"
    run = submit(lab, place, "servers", roles, "--wait", "--", "parameter_servers.py")
    # Two workers may read the same weights before either adds to them.
    found = re.search(r"^weights (\S+) on /job:ps/", run.log(0, 0, 0).read_text(), re.MULTILINE)
    assert found and float(found[1]) > 3 and is_done(run)


@pytest.mark.parametrize(
    "name",
    ["cli", "ops", "script", "sync"],
)
def test_scripts_that_accelerate_ships(
    lab: Lab, place: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    module = f"accelerate.test_utils.scripts.test_{name}"
    words = ("--nproc-per-node=1", "--wait", "--", "-m", module)
    assert is_done(submit(lab, place, name.replace("_", "-"), *words))


def test_mpi_ranks_meet(lab: Lab, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("mpi4py")
    origin = Path(str(importlib.util.find_spec("mpi4py").origin))  # type: ignore[union-attr]
    library = origin.parents[3] / "libmpi.so.12"  # of the package mpich, if it is there
    if library.exists():
        monkeypatch.setenv("MPI4PY_LIBMPI", str(library))
    (place / "mpi_script.py").write_text(script("mpi_script.py"))
    run = submit(lab, place, "ranks", "--nproc-per-node=2", "--wait", "--", "mpi_script.py")
    for rank in range(4):
        assert "4 processes, sum 6" in run.log(0, rank // 2, rank).read_text()
