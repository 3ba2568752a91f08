"""The templates of slurm/ as they stand, on a real cluster: submitted side by side, and preempted.

single_node.sbatch and multi_node.sbatch are tested in test_submit.py.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkout import ROOT
from lab import Lab, wait_until
from ranks import logged_steps

from rollcall.launch.runs import states
from rollcall.launch.runs.goodput import goodput
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines

WORDS = ["device=cpu", "train.steps=20", "log.every=1"]
ENDLESS = "{device: cpu, train: {steps: 1000000}, log: {every: 1}, checkpoint: {every: null}}"
FAKE_APPTAINER = """#!/bin/bash
# Records the options, and starts the program behind the image without a container.
printf '%s\\n' "$@" >"$RECORD"
until [[ $1 == image.sif ]]; do shift; done
exec "${@:2}"
"""
FAKE_SRUN = """#!/bin/bash
# Records the options of pyxis, and starts the step without them.
for word; do
    if [[ $word == --container-* ]]; then echo "$word" >>"$RECORD"; else kept+=("$word"); fi
done
exec @SRUN@ "${kept[@]}"
"""


def submit(
    lab: Lab, root: Path, template: str, *options: str, words: list[str], env: Mapping[str, str]
) -> str:
    """Submit a template as its first lines say; return the job id."""
    answer = lab.exec(
        "login", "sbatch", "--parsable", f"--output={root}/%A.%a.out", *options,
        f"slurm/{template}.sbatch", *words, cwd=ROOT, env=env,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def output(root: Path, job: str) -> str:
    return "".join(path.read_text() for path in root.glob(f"{job}.*.out"))


def losses(run: RunDir) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in logged_steps(run)}


def events(run: RunDir, name: str) -> list[dict[str, object]]:
    return [line for line in read_lines(run.events) if line["event"] == name]


@dataclass
class Jobs:
    """One finished job of each template, and the directory of their runs."""

    root: Path
    ids: dict[str, str]

    def run(self, template: str, name: str | None = None) -> RunDir:
        """The run of a template's job."""
        return RunDir(self.root / "runs", name or f"digits-{self.ids[template]}")


@pytest.fixture(scope="module")
def jobs(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    root = tmp_path_factory.mktemp("templates")
    words = [*WORDS, f"run.root={root}/runs"]
    fakes = {"apptainer": FAKE_APPTAINER, "srun": FAKE_SRUN}
    for name, text in fakes.items():
        (root / name).mkdir()
        (root / name / name).write_text(text.replace("@SRUN@", shutil.which("srun") or "srun"))
        (root / name / name).chmod(0o755)

    def container(fake: str, image: str) -> dict[str, str]:
        path = f"{root / fake}:{os.environ['PATH']}"
        record = str(root / f"{fake}.record")
        return {"PATH": path, "RECORD": record, "IMAGE": image, "PYTHON": sys.executable}

    sweep = {"SWEEP_NAME": "sweep", "SWEEP_VALUES": "1e-3 3e-3", "NPROC_PER_NODE": "1"}
    asked: dict[str, tuple[list[str], dict[str, str]]] = {
        "tasks": (["--ntasks-per-node=1"], {}),
        "array": (["--array=0-2"], sweep),
        "elastic": (["--nodes=1-2"], {"NPROC_PER_NODE": "1"}),
        "pyxis": (["--gpus-per-node=1"], container("srun", "/images/torch.sqsh")),
        "apptainer": (["--gpus-per-node=1"], container("apptainer", "image.sif")),
    }
    ids = {
        template: submit(lab, root, template, *options, words=words, env=env)
        for template, (options, env) in asked.items()
    }
    for template, job in ids.items():
        # Of all the tasks of an array, Slurm would show the state of one.
        for name in (f"{job}_0", f"{job}_1", f"{job}_2") if template == "array" else (job,):
            expected = "FAILED" if name.endswith("_2") else "COMPLETED"
            assert lab.wait_job(name) == expected, output(root, job)
    return Jobs(root, ids)


def test_all_templates_train_to_the_same_losses(jobs: Jobs) -> None:
    expected = losses(jobs.run("apptainer"))
    assert list(expected) == list(range(1, 21))
    for template in ("tasks", "elastic", "pyxis"):
        assert losses(jobs.run(template)) == pytest.approx(expected, rel=1e-5), template
    assert losses(jobs.run("array", "sweep-optim.lr-3e-3")) == pytest.approx(expected, rel=1e-5)


def test_a_task_per_rank_and_an_elastic_job_use_all_their_nodes(jobs: Jobs) -> None:
    [started] = events(jobs.run("tasks"), "started")
    assert (started["world_size"], started["launcher"]) == (2, "srun")
    [started] = events(jobs.run("elastic"), "started")
    assert (started["world_size"], started["launcher"]) == (2, "torchrun")


SCRIPT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(total := torch.ones(1))
print("sum", total.item(), *sys.argv[1:], flush=True)
dist.destroy_process_group()  # else a thread of gloo may abort while Python ends
"""


def test_a_script_of_ones_own_runs_by_the_templates(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    words, run = ["--", str(tmp_path / "mine.py"), "a", "b"], RunDir(tmp_path, "run")
    supervised = submit(lab, tmp_path, "preemptible", words=words, env={"RUN": str(run.path)})
    assert lab.wait_job(supervised) == "COMPLETED", output(tmp_path, supervised)
    assert [run.log(0, rank // 2, rank).read_text() for rank in range(4)] == ["sum 4.0 a b\n"] * 4
    tasks = submit(lab, tmp_path, "tasks", words=words, env={})
    assert lab.wait_job(tasks) == "COMPLETED", output(tmp_path, tasks)
    assert output(tmp_path, tasks).count("sum 4.0 a b\n") == 4


def test_each_task_of_an_array_trains_with_its_value(lab: Lab, jobs: Jobs) -> None:
    other = losses(jobs.run("array", "sweep-optim.lr-1e-3"))
    assert other[20] != losses(jobs.run("array", "sweep-optim.lr-3e-3"))[20]
    job = jobs.ids["array"]
    assert lab.job(f"{job}_2", "ExitCode") == "2:0"
    assert "task 2 has no value in '1e-3 3e-3': submit with --array=0-1" in output(jobs.root, job)


def test_containers_get_the_checkout_at_its_place(jobs: Jobs) -> None:
    assert (jobs.root / "srun.record").read_text().splitlines() == [
        "--container-image=/images/torch.sqsh",
        f"--container-mounts={ROOT}:{ROOT}",
        f"--container-workdir={ROOT}",
    ]
    options = (jobs.root / "apptainer.record").read_text().splitlines()
    assert options[:7] == ["exec", "--bind", str(ROOT), "--pwd", str(ROOT), "--nv", "image.sif"]


def test_a_preempted_job_saves_comes_back_and_loses_no_step(lab: Lab, tmp_path: Path) -> None:
    """With a grace time, where Slurm itself would not requeue a job that ends in order."""
    run, recipe = RunDir(tmp_path, "preempted"), tmp_path / "recipe.yaml"
    recipe.write_text(ENDLESS)
    lab.output("login", "scontrol", "update", "PartitionName=main", "GraceTime=30")
    try:
        options, env = ["--nodes=1", "--nodelist=n1"], {"RUN": str(run.path)}
        job = submit(lab, tmp_path, "preemptible", *options, words=[str(recipe)], env=env)
        wait_until(lambda: len(losses(run)) > 3, 500, lambda: output(tmp_path, job))
        # It keeps the node until the recipe is another one.
        words = ["--partition=urgent", "--nodelist=n1", "--exclusive", "--wrap=sleep 600"]
        urgent = lab.output("login", "sbatch", "--parsable", "--output=/dev/null", *words)
        wait_until(lambda: lab.job(job, "Restarts") == "1", 500, lambda: output(tmp_path, job))
        queued = time.time()
    finally:
        lab.output("login", "scontrol", "update", "PartitionName=main", "GraceTime=0")
    wait_until(
        lambda: lab.job(urgent, "RunTime") >= "00:00:03", 120, lambda: lab.job(urgent, "JobState")
    )
    stopped = run.read_verdict()
    assert stopped is not None
    assert stopped.state == "requeue"
    end = stopped.step + 20
    recipe.write_text(ENDLESS.replace("1000000", str(end)))
    held = time.time() - queued
    lab.output("login", "scancel", urgent)
    assert lab.wait_job(job) == "COMPLETED", output(tmp_path, job)
    assert [line["step"] for line in events(run, "resumed")] == [stopped.step]
    assert [line["step"] for line in logged_steps(run)] == list(range(1, end + 1))
    found = goodput(run, states.look([run])[0][0])
    assert found is not None
    times = [line["time"] for line in run.read_events("started", "finished")]
    down = times[2] - times[1]
    assert held < found.shares["queue"] < down + 5, "another job had the node"
    assert (found.attempts, found.repeated_steps) == (2, 0)


def test_a_cancelled_job_stays_away(lab: Lab, tmp_path: Path) -> None:
    run, recipe = RunDir(tmp_path, "cancelled"), tmp_path / "recipe.yaml"
    recipe.write_text(ENDLESS)
    env = {"RUN": str(run.path)}
    job = submit(lab, tmp_path, "preemptible", "--nodes=1", words=[str(recipe)], env=env)
    wait_until(lambda: len(losses(run)) > 3, 500, lambda: output(tmp_path, job))
    lab.output("login", "scancel", job)
    assert lab.wait_job(job) == "CANCELLED"
    wait_until(lambda: run.read_verdict() is not None, 500, lambda: output(tmp_path, job))
    assert lab.job(job, "Restarts") == "0"
