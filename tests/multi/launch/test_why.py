"""`why` after real failures on one machine: a killed rank, and a head that never came."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkout import ROOT

from rollcall.records.run_dir import RunDir

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
from rollcall.launch.node import supervise
supervise.DEADLINE = 1
sys.exit(supervise.main(sys.argv[1:]))
"""


LONG = pytest.mark.long


def launch(command: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launch", command, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.long
def test_a_killed_rank_of_a_local_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    submit = [sys.executable, str(ROOT / "launch" / "submit.py"), "--local", "--nodes", "2"]
    submit += ["--wait", "--name", "killed", "--root", "runs", "--", "script.py"]
    ended = subprocess.run(submit, cwd=tmp_path, capture_output=True, text=True, timeout=500)
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
    ended = subprocess.run(node, cwd=ROOT, env=os.environ | env, capture_output=True, timeout=500)
    assert ended.returncode == 2
    said = launch("why", "alone", "--root", str(tmp_path))
    assert said.returncode == 0, said.stdout + said.stderr
    assert "node 1 (" in said.stdout
    assert "gave up: node 0 (" in said.stdout and "has not published" in said.stdout


# The model of rank 1 is broken for so many rows, which a step has and no check before it.
BROKEN = """
import os
from torch import nn
from rollcall.config import ConfigError

class Broken(nn.Linear):
    def forward(self, x):
        if os.environ["RANK"] == "1" and len(x) >= int(os.environ.get("ROWS", "1")):
            raise eval(os.environ.get("RAISES", "ValueError"))("a bad model")
        return super().forward(x.flatten(1))

def make(_, source):
    return Broken(64, source.classes)
"""
TRAINING = ["digits", "model.name=broken:make", "device=cpu"]


@pytest.mark.long
def test_a_mistake_that_every_attempt_would_meet_ends_the_run_at_once(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    submit = [sys.executable, str(ROOT / "launch" / "submit.py"), "--local"]
    submit += ["--nproc-per-node", "2", "--wait", "--name", "it", "--root", "runs", *TRAINING]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        submit, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500
    )
    said = ended.stdout + ended.stderr
    run = RunDir(tmp_path / "runs", "it")
    assert ended.returncode == 1, said
    assert "not restarted, because every attempt would fail in the same way" in said
    verdict = run.read_verdict()
    assert verdict is not None and verdict.state == "failed"
    assert verdict.reason.startswith("rank 1 on "), verdict
    assert "ValueError: a bad model" in verdict.reason, verdict
    assert [path.name for path in (run.path / "logs").iterdir()] == ["attempt-0"]


@pytest.mark.parametrize("kind", ["ValueError", pytest.param("ConfigError", marks=LONG)])
def test_torchrun_and_why_name_the_rank_that_raised(kind: str, tmp_path: Path) -> None:
    """A refusal by one rank alone, as of a target that is no class, is no refusal of the run."""
    (tmp_path / "broken.py").write_text(BROKEN)
    torchrun = [sys.executable, str(ROOT / "env" / "bin" / "torchrun"), "--nproc-per-node", "2"]
    words = ["-m", "train", *TRAINING, "run.name=it", f"run.root={tmp_path}"]
    # Not before the run has begun: a run that is refused leaves nothing behind.
    env = os.environ | {"PYTHONPATH": str(tmp_path), "ROWS": "9", "RAISES": kind}
    ended = subprocess.run(
        [*torchrun, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=500
    )
    last = ended.stderr.splitlines()[-1]
    shown = "torchrun: rank 1 failed with exit code 1: ValueError", "rollcall: error"
    assert last == f"{shown[kind == 'ConfigError']}: a bad model", ended.stderr
    said = launch("why", "it", "--root", str(tmp_path))
    assert "rank 1 on" in said.stdout and f"raised {kind}: a bad model" in said.stdout, said


@pytest.mark.long
def test_data_that_git_ignores_is_named_when_it_is_missed(tmp_path: Path, bare: str) -> None:
    reads = "import os, sys\nopen(os.path.join('data', 'small', sys.argv[1] + '.bin'))\n"
    files = {"fit.py": reads, ".gitignore": "*.bin\n", "data/small/train.bin": "1"}
    files["data/small/prepare.py"] = ""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    submit = [sys.executable, str(ROOT / "launch" / "submit.py"), "--local", "--wait"]
    submit += ["--name=a", "--nproc-per-node=1", bare]
    words = ["--", "fit.py", "train"]
    ended = subprocess.run([*submit, *words], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1
    said = launch("why", "a", "--root", str(tmp_path / "runs")).stdout
    link = "--resume --new-code --link data/small"
    assert "data/small/train.bin exists, but was left out of the run's copy, because git" in said
    assert f"ignores it; submit it again with {link}" in said
    again = subprocess.run([*submit, *link.split(), *words], cwd=tmp_path, capture_output=True)
    assert again.returncode == 0
