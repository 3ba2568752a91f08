"""What can befall a run, done to one by the same command that a user has: it goes on by itself."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lab_power
import pytest
from checkout import PACED, ROOT
from lab import Lab, running_lab, wait_until
from ranks import logged_steps, steps_without_a_line

from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]
WORDS = ["device=cpu", "train.steps=1000000", "log.every=1", "checkpoint.every=50", PACED]


def steps(run: RunDir) -> list[int]:
    return [line["step"] for line in logged_steps(run)]


def submit(lab: Lab, run: RunDir, *options: str, nodes: int = 2, words: Sequence[str] = ()) -> str:
    """Start an endless run with 2 ranks on each host; the id of its job."""
    place = ["--name", run.name, "--root", str(run.path.parent)]
    lab.output("login", *SUBMIT, f"--nodes={nodes}", *options, *place, *WORDS, *words)
    job: str = next(read_lines(run.job / "submissions.jsonl"))["job"]
    return job


def hosts(run: RunDir) -> list[list[str]]:
    """The hosts of each attempt."""
    lines = read_lines(run.job / "attempts.jsonl")
    return [line["hosts"] for line in lines if "hosts" in line]


def wait_for_checkpoint(run: RunDir) -> None:
    """Wait until a checkpoint has been published in the present attempt."""

    def is_there() -> bool:
        names = [line["event"] for line in read_lines(run.events)]
        newest = len(names) - 1 - names[::-1].index("first_step") if "first_step" in names else None
        return newest is not None and "checkpointed" in names[newest:]

    outputs = run.job.glob("slurm-*.out")
    wait_until(is_there, 500, lambda: "".join(path.read_text() for path in outputs))


@pytest.fixture(scope="module")
def drilled(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDir]:
    """A run that goes on from drill to drill; at its end every step has been logged once."""
    run = RunDir(tmp_path_factory.mktemp("drills"), "drilled")
    job = submit(lab, run, "--time=10")
    yield run
    lab.output("login", sys.executable, "-m", "launch", "cancel", str(run.path))
    assert lab.wait_job(job) == "CANCELLED"
    wait_until(lambda: run.read_verdict() is not None, 500, lambda: "there is no verdict")
    assert not steps_without_a_line(run)


@pytest.mark.parametrize(
    ("what", "again", "lost", "proctrack"),
    [
        ("kill-rank", 30, 100, "cgroup"),
        ("hang", 40, 100, "cgroup"),
        ("kill-node", 60, 100, "cgroup"),
        ("preempt", 90, 0, "cgroup"),
        ("time-limit", 150, 0, "cgroup"),
        ("kill-node", 60, 100, "linuxproc"),
    ],
    indirect=["proctrack"],
    scope="session",
)
def test_a_run_goes_on(lab: Lab, drilled: RunDir, what: str, again: float, lost: int) -> None:
    """The bounds on time are far above what an idle machine needs: drill prints the true ones."""
    wait_for_checkpoint(drilled)
    drill = [sys.executable, "-m", "launch", "drill", str(drilled.path), what]
    refused = lab.exec("login", *drill)
    assert (refused.returncode, "add --yes" in refused.stderr) == (2, True), refused.stderr
    told = lab.output("login", *drill, "--yes", timeout=500)
    assert float(re.findall(r"training again after +([\d.]+) s", told)[0]) < again
    assert int(re.findall(r"steps done again +(\d+)", told)[0]) <= lost


def test_a_refused_request_is_not_tried_again(lab: Lab, tmp_path: Path) -> None:
    run = RunDir(tmp_path, "refused")
    options = ["--gpus-per-node=1", "--wait", "--name", run.name, "--root", str(tmp_path)]
    done = lab.exec("login", *SUBMIT, *options, "device=cuda", timeout=500)
    assert done.returncode == 2, done.stdout + done.stderr
    starts = [line for line in read_lines(run.job / "attempts.jsonl") if line["event"] == "started"]
    assert len(starts) == 1


@pytest.mark.parametrize(
    ("lose", "words", "event"),
    [
        (lab_power.off, ["parallel.strategy=zero3", "checkpoint.mirror=true"], "lent"),
        (lab_power.freeze, ["parallel.strategy=ddp"], "rescued"),  # no connection ends
    ],
    ids=["lent by a node", "saved by a replica"],
)
def test_a_spare_takes_the_place_of_a_host_and_gets_its_checkpoint(
    lab: Lab,
    lab_options: list[str],
    tmp_path: Path,
    lose: Callable[[Lab, str], object],
    words: list[str],
    event: str,
) -> None:
    options = ("--nodes", "3", "--gpus", "0", *lab_options)
    with running_lab(f"{lab.name}-s", *options) as three:
        run = RunDir(tmp_path, "spared")
        disks = f"checkpoint.local={tmp_path}/$SLURMD_NODENAME"
        job = submit(three, run, "--spares=1", words=[disks, *words])
        wait_for_checkpoint(run)
        wait_until(lambda: steps(run)[-1] > 150, 500, lambda: "no step is taken")
        before = steps(run)[-1]
        lose(three, "n2")

        output = run.job / f"slurm-{job}.out"

        def events(name: str) -> list[int]:
            return [line["step"] for line in read_lines(run.events) if line["event"] == name]

        wait_until(lambda: bool(events("resumed")), 500, output.read_text)
        assert (hosts(run)[0], hosts(run)[-1]) == (["n1", "n2"], ["n1", "n3"])
        assert three.job(job, "Restarts") == "0"
        assert events(event) == events("resumed") and (tmp_path / "n3").is_dir()
        assert event == "lent" or events("resumed")[0] >= before  # no step is repeated
        wait_for_checkpoint(run)


def test_a_spare_takes_over_when_all_hosts_of_the_step_die(
    lab: Lab, lab_options: list[str], tmp_path: Path
) -> None:
    options = ("--nodes", "2", "--gpus", "0", *lab_options)
    with running_lab(f"{lab.name}-a", *options) as two:
        run = RunDir(tmp_path, "outlived")
        job = submit(two, run, "--spares=1", nodes=1)
        wait_for_checkpoint(run)
        lab_power.off(two, "n1")

        output = run.job / f"slurm-{job}.out"
        wait_until(lambda: hosts(run) == [["n1"], ["n2"]], 500, output.read_text)
        wait_for_checkpoint(run)
        assert two.job(job, "Restarts") == "0"
        two.output("login", sys.executable, "-m", "launch", "cancel", str(run.path))
        two.wait_job(job)
