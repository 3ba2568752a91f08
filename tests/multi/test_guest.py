"""A module of somebody's own on two simulated nodes: it meets what torchrun would give it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from train.run import RunDir

SUBMIT = [sys.executable, str(Path(__file__).parents[2] / "launch" / "submit.py")]
PROGRAM = """
import json, os, sys
import torch.distributed as dist
import train.other
dist.init_process_group("gloo")
found = [None] * dist.get_world_size()
place = {key: os.environ[key] for key in ("RANK", "LOCAL_RANK", "GROUP_RANK")}
dist.all_gather_object(found, place)
print(json.dumps({"ranks": found, "argv": sys.argv[1:], "main": __name__, "where": os.getcwd()}))
sys.exit(3)
"""


@pytest.mark.parametrize("method", ["fork", "torchrun"])
def test_a_module_named_as_ours_is_the_users(tmp_path: Path, method: str) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "__main__.py").touch()
    (tmp_path / "train" / "mine.py").write_text(PROGRAM)
    (tmp_path / "train" / "other.py").touch()
    words = ["--local", "--nodes=2", "--nproc-per-node=1", "--wait", "--name=a"]
    words += ["--start-method", method, "--", "-m", "train.mine", "--x", "1"]
    done = subprocess.run(
        [*SUBMIT, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    run = RunDir(tmp_path / "runs", "a")
    assert done.returncode == 3, done.stdout + done.stderr
    told = json.loads(run.log(0, 1, 1).read_text().splitlines()[0])
    assert told == {
        "ranks": [{"RANK": str(n), "LOCAL_RANK": "0", "GROUP_RANK": str(n)} for n in (0, 1)],
        "argv": ["--x", "1"],
        "main": "__main__",
        "where": str(run.code),
    }
    verdict = run.read_verdict()
    assert verdict is not None and verdict.state == "failed"
