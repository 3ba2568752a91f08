"""rollcall installed from its wheel, on a cluster, from a directory that is not the checkout."""

import re
from pathlib import Path

import pytest
from lab import Lab
from wheels import build_wheel, install

from rollcall.records.run_dir import RunDir

MODEL = """
from torch import nn


def Net(*_):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


def test_an_installed_rollcall_submits_a_project(
    lab: Lab, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    site = install(build_wheel(tmp_path_factory.mktemp("wheel")))
    (tmp_path / "mymodel.py").write_text(MODEL)

    def rollcall(*words: str) -> str:
        done = lab.exec(
            "login", str(site / "bin" / "rollcall"), *words,
            env={"PYTHONPATH": str(site)}, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    settings = ["device=cpu", "model.name=mymodel:Net", "train.steps=4", "checkpoint.every=null"]
    told = rollcall("submit", "--nodes=2", "--nproc-per-node=1", "--name=a", *settings)
    job = re.search(r"job (\d+)", told)
    assert job, told
    assert lab.wait_job(job[1]) == "COMPLETED", rollcall("why", "a")
    run = RunDir(tmp_path / "runs", "a")
    assert (run.code / "mymodel.py").read_text() == MODEL
    assert re.search(r"a +done", rollcall("status"))
    assert "has not failed: done" in rollcall("why", "a")
