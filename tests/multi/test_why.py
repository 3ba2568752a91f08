"""`why` after real failures on one machine: a killed rank, and a head that never came."""

import os
import subprocess
import sys
import time
from pathlib import Path

from train.run import RunDir

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(100):
    print("step", step, flush=True)
    dist.all_reduce(torch.ones(1))
    if step == 3 and dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
"""
# A node 1 that is alone, and has less patience than a real one.
ALONE = """
import sys
from launch import supervise
supervise.DEADLINE = 1
sys.exit(supervise.main(sys.argv[1:]))
"""


def launch(command: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launch", command, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_killed_rank_of_a_local_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    submit = [sys.executable, str(ROOT / "launch" / "submit.py"), "--local", "--nodes", "2"]
    submit += ["--wait", "--name", "killed", "--root", "runs", "--", "script.py"]
    ended = subprocess.run(submit, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ended.returncode not in (0, os.EX_TEMPFAIL), ended.stdout + ended.stderr
    place = ["killed", "--root", str(tmp_path / "runs")]
    said = launch("why", *place)
    assert said.returncode == 0, said.stderr
    first, usually, others, *rest = said.stdout.splitlines()
    assert "rank 3 on" in first and "(node 1) was ended by SIGKILL" in first
    assert "memory ran out" in usually
    assert others == "  3 ranks ended because of it"
    assert rest[-1] == "  | step 3"
    assert " failed " in launch("status", *place).stdout

    merged = launch("logs", "--merge", *place)
    shown = merged.stdout.splitlines()
    expected = {f"[rank {rank}] step {step}" for rank in range(4) for step in range(4)}
    assert expected <= set(shown)
    assert [line[-1] for line in shown if line.startswith("[rank 3] step")] == list("0123")
    for command in ("cancel", "stacks", "attach", "requeue"):
        refused = launch(command, "--root", place[2], "killed")
        assert (refused.returncode, "Traceback" in refused.stderr) == (2, False), refused.stderr


def test_a_head_that_never_came(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "alone")
    env = {"SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_NTASKS": "2"}
    env["SUBMITIT_LOCAL_JOB_ID"] = str(os.getpid())
    run.job.mkdir(parents=True)
    (run.job / f"{os.getpid()}_1_log.out").touch()
    (run.job / "submissions.jsonl").write_text(
        f'{{"job": "{os.getpid()}", "time": {time.time()}}}\n'
    )
    node = [sys.executable, "-c", ALONE, "--run-dir", str(run.path), "--", "-m", "train"]
    ended = subprocess.run(node, cwd=ROOT, env=os.environ | env, capture_output=True, timeout=120)
    assert ended.returncode == 2
    said = launch("why", "alone", "--root", str(tmp_path))
    assert said.returncode == 0, said.stdout + said.stderr
    assert "node 1 (" in said.stdout
    assert "gave up: node 0 (" in said.stdout and "has not published" in said.stdout
