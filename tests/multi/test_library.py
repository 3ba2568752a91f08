"""The script of docs/from-your-script.md: killed, stopped and resumed on other numbers of ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import free_port

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from-your-script.md"
STEPS = 60


def script(slow: bool) -> str:
    text: str
    [text] = [
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "Checkpointer(" in block
    ]
    pause = "        import time; time.sleep(0.1)\n        step += 1\n"
    return text.replace("        step += 1\n", pause) if slow else text


class Loop:
    """The script on several ranks, in one directory."""

    def __init__(self, directory: Path, world_size: int, slow: bool = False) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "loop.py").write_text(script(slow))
        place = {"WORLD_SIZE": f"{world_size}", "LOCAL_WORLD_SIZE": f"{world_size}"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
        self.directory = directory
        self.started = len(self.text())
        with (directory / "out.txt").open("a") as out:
            self.ranks = [
                subprocess.Popen(
                    [sys.executable, "loop.py"],
                    cwd=directory,
                    env=os.environ
                    | place
                    | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
                    | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
                for rank in range(world_size)
            ]

    def text(self) -> str:
        path = self.directory / "out.txt"
        return path.read_text() if path.exists() else ""

    def send(self, number: signal.Signals, step: int) -> list[int]:
        """Send a signal to the ranks once rank 0 has printed this step; return the exit codes."""
        deadline = time.monotonic() + 120
        while f"step {step} " not in self.text()[self.started :]:
            assert time.monotonic() < deadline and self.ranks[0].poll() is None, self.text()
            time.sleep(0.02)
        for rank in self.ranks:
            rank.send_signal(number)
        return self.wait()

    def wait(self) -> list[int]:
        return [rank.wait(120) for rank in self.ranks]


def losses(loop: Loop) -> dict[int, float]:
    found = re.findall(r"step (\d+) loss (\S+)", loop.text())
    return {int(step): float(loss) for step, loss in found}


def test_the_documented_loop_resumes_with_everything(tmp_path: Path) -> None:
    undisturbed = Loop(tmp_path / "undisturbed", 2)
    assert undisturbed.wait() == [0, 0], undisturbed.text()

    place = tmp_path / "disturbed"
    killed = Loop(place, 2, slow=True).send(signal.SIGKILL, 33)
    assert killed == [-9, -9]
    stopped = Loop(place, 1, slow=True)
    assert stopped.send(signal.SIGTERM, 45) == [75], stopped.text()
    assert "step 20 " not in stopped.text()[stopped.started :]  # it did not begin again
    last = Loop(place, 2)
    assert last.wait() == [0, 0], last.text()
    assert "step 44 " not in last.text()[last.started :]

    expected = losses(undisturbed)
    assert sorted(expected) == [*range(1, STEPS + 1)]
    assert losses(last) == pytest.approx(expected, rel=1e-5)
    assert "warning" not in last.text()
