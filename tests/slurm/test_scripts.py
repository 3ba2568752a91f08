"""A torchrun script of somebody's own, unmodified, in a chain of jobs on two nodes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkout import ROOT
from lab import Lab, wait_until
from ranks import logged_steps

from rollcall.launch.runs import find
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]
# In the style of PyTorch's tutorials; it and its helper are named as rollcall's packages are.
SCRIPT = """
import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from launch import STEPS
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--checkpoint", type=Path)
args = parser.parse_args()
while not args.checkpoint.with_name("go").exists():
    time.sleep(0.1)
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
first = 0
if args.checkpoint.exists():
    state = torch.load(args.checkpoint)
    model.module.load_state_dict(state["model"])
    first = state["step"]
for step in range(first, STEPS):
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "step": step + 1}, args.checkpoint)
        print("step", step, "of", dist.get_world_size(), "ranks at lr", args.lr)
    dist.barrier()
    if first == 0 and step == 2:
        raise RuntimeError("lost")
dist.destroy_process_group()
"""


@dataclass
class Chain:
    """Three jobs of one run: the first fails after three steps, the second ends the run."""

    run: RunDir
    submitted: str
    exit_code: int
    again: str
    jobs: list[str]


@pytest.fixture(scope="module")
def chain(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    place = tmp_path_factory.mktemp("mine")
    (place / "train.py").write_text(SCRIPT)
    (place / "launch.py").write_text("STEPS = 5\n")
    subprocess.run(["git", "init", "-q", str(place)], check=True)
    words = ["--nodes", "2", "--chain", "3", "--name", "mine", "--exclude=n4", "--time=10"]
    words += ["--", "train.py", "--lr", "0.5", "--checkpoint", str(place / "model.pt")]
    run = RunDir(place / "runs", "mine")

    def jobs() -> list[str]:
        return [line["job"] for line in read_lines(run.job / "submissions.jsonl")]

    with subprocess.Popen(
        lab.argv("login", *SUBMIT, "--wait", *words), cwd=place, stdout=subprocess.PIPE, text=True
    ) as submit:
        wait_until(lambda: len(jobs()) == 3, 500, lambda: f"{len(jobs())} jobs are queued")
        again = lab.exec("login", *SUBMIT, *words, cwd=place)
        assert again.returncode == 0, again.stderr
        (place / "train.py").write_text("raise SystemExit('this edit came too late')")
        edited = lab.exec("login", *SUBMIT, *words, cwd=place)
        assert edited.returncode == 2 and "train.py changed since then" in edited.stderr
        (place / "go").touch()  # not before: it is to be found live
        submitted = submit.communicate(timeout=500)[0]
    return Chain(run, submitted, submit.returncode, again.stderr, jobs())


def output(chain: Chain, job: str) -> str:
    return (chain.run.job / f"slurm-{job}.out").read_text()


def test_the_script_runs_on_all_nodes_and_its_failure_is_the_jobs(lab: Lab, chain: Chain) -> None:
    first = output(chain, chain.jobs[0])
    assert "step 2 of 4 ranks at lr 0.5" in first
    assert "RuntimeError: lost" in first
    assert lab.job(chain.jobs[0], "JobState") == "FAILED"
    assert len(list(chain.run.path.glob("logs/attempt-0/node-*/rank-*.log"))) == 4


def test_the_next_job_continues_and_the_one_after_falls_away(lab: Lab, chain: Chain) -> None:
    second = output(chain, chain.jobs[1])
    assert "step 2 " not in second
    assert "step 4 of 4 ranks at lr 0.5" in second
    assert json.loads(chain.run.verdict.read_text())["state"] == "done"
    assert [lab.job(job, "JobState") for job in chain.jobs[1:]] == ["COMPLETED", "COMPLETED"]
    assert "run mine is finished" in output(chain, chain.jobs[2])
    steps = ("sacct", "--noheader", "--parsable2", "--format=JobID,State", "--jobs", chain.jobs[2])

    def accounted() -> str:
        return lab.output("login", *steps)

    job = chain.jobs[2]  # it starts nothing
    expected = f"{job}|COMPLETED\n{job}.batch|COMPLETED"
    wait_until(lambda: accounted() == expected, 500, accounted)
    assert len(list(chain.run.path.glob("logs/attempt-*"))) == 2


def test_submitting_tells_what_is_queued_and_a_live_run_is_left_alone(chain: Chain) -> None:
    assert f"job {chain.jobs[0]}, 2 nodes, expected to start at" in chain.submitted
    assert f"jobs {chain.jobs[1]}, {chain.jobs[2]}, each after the one before" in chain.submitted
    for command in ("logs --follow", "cancel"):
        # In the project, whose runs/ is the default root, the run's name is enough.
        shown = rf"({ROOT}/env/run --quiet rollcall|{ROOT}/env/bin/rollcall) {command} mine\n"
        assert re.search(shown, chain.submitted)
    assert f"run mine is live (job {chain.jobs[0]} " in chain.again
    assert len(chain.jobs) == 3


def test_waiting_for_a_chain_shows_all_its_jobs_and_ends_as_the_run(chain: Chain) -> None:
    shown = [chain.submitted.index(part) for part in ("step 2 of", "step 4 of", "is finished")]
    assert shown == sorted(shown)
    assert chain.exit_code == 0


def test_an_array_gives_each_task_a_run_of_its_own(lab: Lab, tmp_path: Path) -> None:
    """Submitted inside a job, whose variables do not reach the new one."""
    names = ("SLURM_ARRAY_TASK_ID", "SLURM_WITNESS", "SBATCH_TIMELIMIT", "PMI_WITNESS", "MINE")
    (tmp_path / "tell.py").write_text(
        f"import os\nprint('told', *(os.environ.get(name) for name in {names}))\n"
    )
    words = ["--array=0-1", "--nproc-per-node=1", "--name=many", "--", "tell.py"]
    leaking = {"SLURM_WITNESS": "1", "SBATCH_TIMELIMIT": "7", "PMI_WITNESS": "1", "MINE": "1"}
    submitted = lab.exec("login", "srun", *SUBMIT, *words, cwd=tmp_path, env=leaking)
    assert submitted.returncode == 0, submitted.stderr
    assert "rollcall watch many\n" in submitted.stdout
    tasks = [RunDir(tmp_path / "runs" / "many", f"task-{index}") for index in (0, 1)]
    wait_until(lambda: all(map(RunDir.read_verdict, tasks)), 500, lambda: "there is no verdict")
    for index, task in enumerate(tasks):
        assert task.log(0, 0, 0).read_text() == f"told {index} None None None 1\n"


def test_a_script_that_meets_its_time_limit_is_not_started_again(lab: Lab, tmp_path: Path) -> None:
    """As plain Slurm ends it; a script that saves and exits with 75 comes back."""
    (tmp_path / "work.py").write_text(
        "import os, signal, sys, time\n"
        "print('start', os.environ.get('SLURM_RESTART_COUNT', '0'), flush=True)\n"
        "if 'SLURM_RESTART_COUNT' in os.environ: sys.exit()\n"
        "if 'saves' in sys.argv: signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))\n"
        "while True: time.sleep(0.1)\n"
    )
    jobs = {}
    for name in ("saves", "sleeps"):
        words = ["--nproc-per-node=1", f"--name={name}", "--time=1", "--", "work.py", name]
        submitted = lab.exec("login", *SUBMIT, *words, cwd=tmp_path)
        assert submitted.returncode == 0, submitted.stderr
        lines = read_lines(tmp_path / "runs" / name / "job" / "submissions.jsonl")
        jobs[name] = next(iter(lines))["job"]

    def states() -> dict[str, str]:
        return {name: lab.job(job, "JobState") for name, job in jobs.items()}

    wait_until(
        lambda: states() == {"saves": "COMPLETED", "sleeps": "TIMEOUT"}, 300, lambda: str(states())
    )
    assert not (tmp_path / "runs" / "sleeps" / "job" / "restarts.jsonl").exists()
    for name, state in (("saves", "done"), ("sleeps", "failed")):
        verdict = RunDir(tmp_path / "runs", name).read_verdict()
        assert verdict is not None
        assert verdict.state == state


def test_gpus_and_variables_of_sbatch_reach_slurm(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "tell.py").touch()
    words = ["--hold", "--gres=gpu:2", "--nodes=2", "--name=asks", "--time=9", "--", "tell.py"]
    env = {"SBATCH_PARTITION": "urgent", "SBATCH_TIMELIMIT": "7", "SBATCH_COMMENT": "none"}
    env |= {"SBATCH_REQUEUE": "1", "SBATCH_MEM_PER_NODE": "64M"}
    submitted = lab.exec("login", *SUBMIT, *words, cwd=tmp_path, env=env)
    assert submitted.returncode == 0, submitted.stderr
    lines = read_lines(tmp_path / "runs" / "asks" / "job" / "submissions.jsonl")
    job = next(iter(lines))["job"]
    expected = {
        "Partition": "urgent",
        "TimeLimit": "00:09:00",
        "CPUs/Task": "4",  # of 8, for 2 of 4 GPUs
        "TresPerNode": "gres:gpu:2",
        "MinMemoryNode": "64M",
    }
    assert {field: lab.job(job, field) for field in expected} == expected
    lab.exec("login", "scancel", job)


def test_groups_of_nodes_train_together(lab: Lab, tmp_path: Path) -> None:
    words = ["digits", "device=cpu", "train.steps=10", "log.every=1"]
    groups = ["--nodelist=n3", "--gpus-per-node=1", *words]
    groups += [":", "--nodes=2", "--nodelist=n1,n2", "--gpus-per-node=2"]
    done = lab.exec("login", *SUBMIT, "--wait", "--name=groups", *groups, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = ["--local", "--wait", "--name=whole", "--nproc-per-node=5", *words]
    done = lab.exec("login", *SUBMIT, *whole, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [RunDir(tmp_path / "runs", name) for name in ("groups", "whole")]
    first, second = ([line["loss"] for line in logged_steps(run)] for run in runs)
    assert first == pytest.approx(second, rel=1e-6) and len(first) == 10
    (attempt,) = find.attempts(runs[0])
    assert (attempt.hosts, attempt.ranks) == (["n3", "n1", "n2"], 5)


def test_jax_gets_an_address_of_another_host_and_says_that_cpus_need_a_host_name(
    lab: Lab, tmp_path: Path
) -> None:
    (tmp_path / "fit.py").write_text("import os\nprint(os.environ['JAX_COORDINATOR_ADDRESS'])\n")
    words = ["--nodes=2", "--nproc-per-node=1", "--framework=jax", "--name=jax", "--wait"]
    done = lab.exec("login", *SUBMIT, *words, "--", "fit.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = RunDir(tmp_path / "runs", "jax").log(0, 1, 1).read_text()
    assert re.search(r"^10\.42\.0\.\d+:\d+$", said, re.MULTILINE), said
    assert re.search(r"'n\d' resolves to .* 127.0.1.1,.* JAX cannot connect its processes", said)
