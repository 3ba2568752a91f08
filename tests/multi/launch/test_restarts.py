"""Ranks that fail start again on all nodes, with no new import of torch, if that is wished."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from checkout import PACED, ROOT
from disks import until

from rollcall.messages.refusal import FENCED
from rollcall.records.run import CLAIM
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines, write_atomic

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]
SCRIPT = """
import os, pathlib, signal, sys
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
killed = pathlib.Path(sys.argv[1])
killed.mkdir(exist_ok=True)
count = len(list(killed.iterdir()))
if dist.get_rank() == 1 and count < 3:
    (killed / str(count)).touch()
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
print(os.environ["MASTER_PORT"])
"""


KILLED_AT_THE_START = """
import os, pathlib, signal, sys, time

rank, killed = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
if killed.exists():
    sys.exit()
if rank == 0:
    time.sleep(2)  # the others have started by then
    pathlib.Path(sys.argv[1] + ".soon").touch()
    os.kill(os.getpid(), signal.SIGKILL)
while not pathlib.Path(sys.argv[1] + ".soon").exists():
    time.sleep(0.05)
if rank == 1:
    time.sleep(600)  # so the agent of its node waits before it reports that rank 0 was killed
killed.touch()
print("could not join the other ranks: Connection reset by peer", file=sys.stderr, flush=True)
sys.exit(2)
"""


@pytest.mark.long
def test_ranks_that_cannot_join_a_killed_one_do_not_count_as_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(KILLED_AT_THE_START)
    words = ["--local", "--nodes=2", "--nproc-per-node=2", "--wait", "--name=a"]
    words += ["--max-restarts=1", "--", "script.py", str(tmp_path / "killed")]
    done = subprocess.run(
        [*SUBMIT, *words], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert "rank 0" in done.stderr + done.stdout and "SIGKILL" in done.stderr + done.stdout
    verdict = RunDir(tmp_path / "runs", "a").read_verdict()
    assert verdict is not None and verdict.state == "done", done.stdout + done.stderr
    assert done.returncode == 0


@pytest.mark.long
def test_a_script_starts_again_where_it_asked_for_that(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["--local", "--nodes=2", "--nproc-per-node=1", "--wait", "--name=a"]
    words += ["--max-restarts=3", "--", "script.py", str(tmp_path / "killed")]
    done = subprocess.run(
        [*SUBMIT, *words], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    run = RunDir(tmp_path / "runs", "a")
    verdict = run.read_verdict()
    assert verdict is not None, done.stdout + done.stderr
    states = [
        line["state"] for line in read_lines(run.job / "attempts.jsonl") if line["event"] == "ended"
    ]
    assert (done.returncode, verdict.state, states) == (0, "done", [*["failed"] * 3, "finished"])
    ports = [json.loads(path.read_text()) for path in run.job.glob("rendezvous/*.json")]
    used = {told["port"] for told in ports if "port" in told}
    assert sum("port" in told for told in ports) == 4  # each attempt has one, seldom the same
    assert {run.log(3, node, node).read_text().strip() for node in (0, 1)} <= set(map(str, used))


@pytest.mark.long
def test_a_fenced_training_gives_way_and_starts_no_further_attempt(tmp_path: Path) -> None:
    words = ["--local", "--nodes=2", "--nproc-per-node=1", "--wait", "--name=a", "digits"]
    words += [f"--root={tmp_path}", "device=cpu", "train.steps=1000000", "checkpoint.every=20"]
    words.append(PACED)
    run = RunDir(tmp_path, "a")
    with subprocess.Popen([*SUBMIT, *words], stdout=subprocess.DEVNULL) as submit:
        until(lambda: bool(run.read_events("checkpointed")))
        write_atomic(run.path / CLAIM.format(1), "another attempt\n")
        submit.wait(500)
    codes = [line.get("exit_code") for line in read_lines(run.job / "attempts.jsonl")]
    assert codes == [None, FENCED]
    assert run.read_verdict() is None, "that is for the other attempt to write"


@pytest.mark.long
def test_a_node_that_waits_for_the_head_takes_a_signal_along_to_its_ranks(tmp_path: Path) -> None:
    """Had it left, the head's ranks would have waited for its ranks, and the run been failed."""
    run = RunDir(tmp_path, "a")
    job = {"SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_JOB_ID": str(os.getpid())}
    command = [sys.executable, "-m", "rollcall", "supervise", f"--run-dir={run.path}"]
    command += ["--nproc-per-node=1", "--", "-m", "train", "digits", "device=cpu"]
    start = partial(subprocess.Popen, [*command, "train.steps=1000000", PACED], cwd=ROOT)
    nodes = [{**os.environ, **job, "SUBMITIT_LOCAL_GLOBALID": number} for number in "01"]
    with start(env=nodes[1]) as waiting:
        until(lambda: any(run.job.glob("heartbeats/*/node-1")))
        waiting.send_signal(signal.SIGUSR2)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(1)
        with start(env=nodes[0]) as head:
            assert (head.wait(500), waiting.wait(500)) == (os.EX_TEMPFAIL, os.EX_TEMPFAIL)
    verdict = run.read_verdict()
    assert verdict is not None and verdict.state in ("requeue", "stopped")
