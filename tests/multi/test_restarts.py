"""Ranks that fail start again on all nodes, with no new import of torch, if that is wished."""

import json
import subprocess
import sys
from pathlib import Path

from rollcall.records.files import read_lines
from rollcall.run_dir import RunDir

SUBMIT = [sys.executable, str(Path(__file__).parents[2] / "launch" / "submit.py")]
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


def test_a_script_starts_again_where_it_asked_for_that(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["--local", "--nodes=2", "--nproc-per-node=1", "--wait", "--name=a"]
    words += ["--max-restarts=3", "--", "script.py", str(tmp_path / "killed")]
    done = subprocess.run(
        [*SUBMIT, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
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
