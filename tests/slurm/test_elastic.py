"""Jobs that outlive their hosts: the first one, too, and with fewer hosts than they began with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import lab_power
import pytest
from checkout import ROOT
from lab import Lab, running_lab, wait_until

from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]
WORDS = ["digits", "device=cpu", "exact=true", "checkpoint.every=50", "train.steps=400"]
WORDS += ["model.name=tests.helpers.user_code:gated"]


@pytest.fixture(scope="module")
def three(lab: Lab, lab_options: list[str]) -> Iterator[Lab]:
    """A cluster of three hosts that may die."""
    with running_lab(f"{lab.name}-e", "--nodes", "3", "--gpus", "0", *lab_options) as three:
        # Else Slurm takes a dead host away from its job, before it is back or after.
        conf = lab_power.place(three) / "slurm.conf"
        conf.write_text(conf.read_text().replace("SlurmdTimeout=12", "SlurmdTimeout=300"))
        three.output("login", "scontrol", "reconfigure")
        yield three


def submit(lab: Lab, run: RunDir, *options: str, gate: str = "0:0:") -> str:
    """Start a run; the id of its job."""
    place = ["--name", run.name, "--root", str(run.path.parent), "--time=15"]
    done = lab.exec("login", *SUBMIT, *options, *place, *WORDS, env={"GATE": gate})
    assert done.returncode == 0, done.stderr
    job: str = next(read_lines(run.job / "submissions.jsonl"))["job"]
    return job


def hosts(run: RunDir) -> list[list[str]]:
    """The hosts of each attempt that has come to train."""
    lines = list(read_lines(run.job / "attempts.jsonl"))
    steps = sum(line["event"] == "first_step" for line in read_lines(run.events))
    return [line["hosts"] for line in lines if "hosts" in line][:steps]


def wait_for_hosts(run: RunDir, expected: list[list[str]]) -> None:
    def output() -> str:
        texts = [path.read_text() for path in run.job.glob("slurm-*.out")]
        return f"trained on {hosts(run)}: {''.join(texts)}"

    wait_until(lambda: hosts(run) == expected, 500, output)


def wait_for_checkpoint(run: RunDir) -> None:
    outputs = run.job.glob("slurm-*.out")
    wait_until(
        lambda: any(run.checkpoints.glob("step-*")),
        500,
        lambda: "".join(path.read_text() for path in outputs),
    )


def result(run: RunDir) -> str:
    """The hash of the weights of a run that is done."""

    def found() -> list[str]:
        return [line["weights"] for line in read_lines(run.events) if line.get("state") == "done"]

    outputs = run.job.glob("slurm-*.out")
    wait_until(lambda: bool(found()), 500, lambda: "".join(path.read_text() for path in outputs))
    return found()[0]


def test_a_run_outlives_its_first_host_and_takes_it_back(three: Lab, tmp_path: Path) -> None:
    """On 4 ranks, on 2, and on 4 again; with the weights of a run that stayed on 2."""
    run, whole = RunDir(tmp_path, "elastic"), RunDir(tmp_path, "whole")
    # On two ranks a step has four passes: the run is not done before both hosts train again.
    job = submit(three, run, "--nodes=1-2", gate=f"1:0.15:{tmp_path}/gate")
    wait_for_checkpoint(run)
    submit(three, whole, "--nodes=1", "--nodelist=n3")
    lab_power.off(three, "n1")
    wait_for_hosts(run, [["n1", "n2"], ["n2"]])
    lab_power.on(three, "n1")
    wait_for_hosts(run, [["n1", "n2"], ["n2"], ["n1", "n2"]])
    (tmp_path / "gate").touch()
    assert result(run) == result(whole)
    # Its script has died: the supervisor that became its batch has to end it. The host that is back
    # may have said to Slurm before that there is no script any more.
    assert three.wait_job(job) in ("CANCELLED", "COMPLETED")
    causes = [line["cause"] for line in read_lines(run.job / "restarts.jsonl")]
    assert causes == ["lost node", "more hosts"]


def test_a_mesh_that_fits_not_every_number_of_nodes_is_refused(three: Lab, tmp_path: Path) -> None:
    words = ["--nodes=1-2", "--root", str(tmp_path), "digits", "parallel.mesh=tensor=4"]
    done = three.exec("login", *SUBMIT, *words)
    assert done.returncode == 2
    assert "--nodes 1-2: with 1 of them, parallel.mesh=tensor=4" in done.stderr
    assert list(tmp_path.iterdir()) == []
