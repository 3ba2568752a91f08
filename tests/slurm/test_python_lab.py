"""Runs that a Python program on the login host submits to a real cluster, and waits for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from checkout import ROOT
from lab import Lab, wait_until
from pages import python_page, shown

from rollcall.records.run_dir import RunDir

PYTHON = [str(ROOT / "env/run"), "python"]
COUNTS = """
import json, os, time
import rollcall

def count(steps):
    path = rollcall.checkpoint_dir() / f"rank-{os.environ['RANK']}"
    done = path.read_text().split() if path.exists() else []
    for _ in range(len(done), steps):
        time.sleep(0.5)
        with path.open("a") as file:
            file.write(f"{os.environ['SLURM_RESTART_COUNT'] if done else 0} ")
        print("step", flush=True)
    return path.read_text().split()

job = rollcall.submit(count, 20, nodes=2, nproc_per_node=1, name="counts")
print(job.state, flush=True)
print(json.dumps(job.result()), flush=True)
"""
MANY = """
import asyncio, time
import rollcall

def square(number):
    if number == 2:
        raise ValueError("no two")
    return number ** 2

async def together():
    return await asyncio.gather(*(job for number, job in enumerate(jobs) if number != 2))

jobs = rollcall.map(square, range(4), nproc_per_node=1, throttle=2, name="many")
first = {job.state for job in jobs}
assert first <= {"pending", "running"}, first
assert [job.wait(500) for job in jobs] == ["done", "done", "failed", "done"]
assert "raised ValueError: no two" in str(jobs[2].exception()), jobs[2].exception()
assert asyncio.run(together()) == [0, 1, 9]
waits = rollcall.submit(time.sleep, 600, nproc_per_node=1, begin="now+1hour")
assert waits.state == "pending", waits
waits.cancel()
assert waits.wait(500) == "stopped", waits
try:
    rollcall.submit(square, 1, partition="mian")
except rollcall.RefusedError as error:
    print(error)
"""


@pytest.mark.timeout(900)
def test_the_program_of_the_page_runs(lab: Lab, tmp_path: Path) -> None:
    program = [*python_page(), "print(asyncio.run(both()))\n"]
    (tmp_path / "page.py").write_text("\n".join(program))
    done = lab.exec("login", *PYTHON, "page.py", cwd=tmp_path, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert shown(done.stdout), done.stdout


def test_a_preempted_function_continues_with_what_it_saved(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "counts.py").write_text(COUNTS)
    with subprocess.Popen(
        lab.argv("login", *PYTHON, "counts.py"), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as program:
        run = RunDir(tmp_path / "runs", "counts")
        log = run.log(0, 0, 0)
        wait_until(lambda: log.exists() and "step" in log.read_text(), 500, lambda: "no step")
        urgent = ["--parsable", "--partition=urgent", "--nodes=4", "--exclusive"]
        urgent += ["--output=/dev/null", "--wrap", "sleep 5"]
        lab.output("login", "sbatch", *urgent)
        output, _ = program.communicate(timeout=500)
        assert program.returncode == 0
    state, result = output.splitlines()
    attempts = json.loads(result)
    assert state in ("pending", "running") and len(attempts) == 20
    assert attempts == sorted(attempts) and {*attempts} == {"0", "1"}


def test_an_array_a_failure_and_a_cancelled_job(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text(MANY)
    done = lab.exec("login", *PYTHON, "many.py", cwd=tmp_path, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "partition mian: no such partition; this cluster has main, urgent" in done.stdout
