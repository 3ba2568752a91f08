"""A module of somebody's own on two simulated nodes: it meets what torchrun would give it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkout import ROOT

from rollcall.launch.runs.processes import Processes
from rollcall.records.run_dir import RunDir

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]
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


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "torchrun"])
def test_a_module_named_as_ours_is_the_users(tmp_path: Path, method: str) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "__main__.py").touch()
    (tmp_path / "train" / "mine.py").write_text(PROGRAM)
    (tmp_path / "train" / "other.py").touch()
    words = ["--local", "--nodes=2", "--nproc-per-node=1,2", "--wait", "--name=a"]
    words += ["--start-method", method, "--", "-m", "train.mine", "--x", "1"]
    done = subprocess.run(
        [*SUBMIT, *words], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    run = RunDir(tmp_path / "runs", "a")
    assert done.returncode == 3, done.stdout + done.stderr
    told = json.loads(run.log(0, 1, 1).read_text().splitlines()[0])
    assert told == {
        "ranks": [
            {"RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": node}
            for rank, local, node in ("000", "101", "211")
        ],
        "argv": ["--x", "1"],
        "main": "__main__",
        "where": str(run.code),
    }
    verdict = run.read_verdict()
    assert verdict is not None and verdict.state == "failed"


def heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where pytest runs in the background


def submitted(folder: Path, bare: str) -> subprocess.Popen[str]:
    words = ["--local", "--nproc-per-node=1", "--wait", "--name=a", bare, "--", "stays.py"]
    return subprocess.Popen(
        [*SUBMIT, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heed_interrupts,
    )


def test_an_interrupt_right_after_the_start_ends_the_run(tmp_path: Path, bare: str) -> None:
    (tmp_path / "stays.py").write_text("import time; time.sleep(1000)")
    with submitted(tmp_path, bare) as waiting:
        assert waiting.stdout is not None
        assert any("submitted:" in line for line in waiting.stdout)
        waiting.send_signal(signal.SIGINT)
        left = waiting.stdout.read()
        assert waiting.wait(500) == 130, left
    assert "asked the run to save and stop" in left and "Traceback" not in left
    assert not Processes().of(RunDir(tmp_path / "runs", "a"))


def test_a_second_interrupt_stops_waiting_not_the_run(tmp_path: Path, bare: str) -> None:
    stays = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    waits = f"while not pathlib.Path({str(tmp_path / 'end')!r}).exists(): time.sleep(0.1)"
    ends = f"pathlib.Path({str(tmp_path / 'gone')!r}).touch()"
    up = "print('it is up', flush=True)"
    script = ["import pathlib, signal, time", stays, up, waits, ends]
    (tmp_path / "stays.py").write_text("\n".join(script))

    with submitted(tmp_path, bare) as waiting:
        assert waiting.stdout is not None
        for text in ("it is up", "asked the run to save and stop"):
            assert any(text in line for line in waiting.stdout)
            waiting.send_signal(signal.SIGINT)
        left = waiting.stdout.read()
        assert waiting.wait(500) == 130
        assert "the run may go on; see" in left and "Traceback" not in left
    (tmp_path / "end").touch()
    end = time.monotonic() + 500
    while not (tmp_path / "gone").exists():
        assert time.monotonic() < end, RunDir(tmp_path / "runs", "a").log(0, 0, 0).read_text()
        time.sleep(0.1)
