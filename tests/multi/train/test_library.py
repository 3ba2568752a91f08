"""The script of docs/from-your-script.md: killed, stopped and resumed on other numbers of ranks."""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from checkout import ROOT
from ranks import FORKSERVER, together
from torch import nn
from torch.utils.data import TensorDataset

from rollcall import Checkpointer, Loader, World
from rollcall.system.hosts import free_port

PAGE = ROOT / "docs" / "from-your-script.md"
STEPS = 60


def script(slow: bool) -> str:
    text: str
    [text] = [
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "Checkpointer(" in block
    ]
    pause = "            import time; time.sleep(0.1)\n            step += 1\n"
    return text.replace("            step += 1\n", pause) if slow else text


def run(directory: Path, env: Mapping[str, str]) -> None:
    """Run the script as `python loop.py` does, in a process that has imported torch."""
    os.chdir(directory)
    os.environ.update(env)
    out = os.open("out.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.argv = ["loop.py"]
    runpy.run_path("loop.py", run_name="__main__")


class Loop:
    """The script on several ranks, in one directory."""

    def __init__(self, directory: Path, world_size: int, slow: bool = False) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "loop.py").write_text(script(slow))
        place = {"WORLD_SIZE": f"{world_size}", "LOCAL_WORLD_SIZE": f"{world_size}"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
        self.directory = directory
        self.started = len(self.text())
        self.ranks: list[BaseProcess] = []
        for rank in range(world_size):
            env = place | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
            process = FORKSERVER.Process(target=run, args=(directory, env))
            process.start()
            self.ranks.append(process)

    def text(self) -> str:
        path = self.directory / "out.txt"
        return path.read_text() if path.exists() else ""

    def send(self, number: signal.Signals, step: int) -> list[int | None]:
        """Send a signal to the ranks once rank 0 has printed this step; return the exit codes."""
        deadline = time.monotonic() + 500
        while f"step {step} " not in self.text()[self.started :]:
            assert time.monotonic() < deadline and self.ranks[0].is_alive(), self.text()
            time.sleep(0.02)
        for rank in self.ranks:
            os.kill(rank.pid or 0, number)
        return self.wait()

    def wait(self) -> list[int | None]:
        for rank in self.ranks:
            rank.join(500)
        return [rank.exitcode for rank in self.ranks]


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


def _train_with_batchnorm(_rank: int, folder: Path) -> None:
    """Train to the end in one go, and with a resume in the middle of a pass."""
    world = World.join("cpu")
    drawn = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(44, 4, generator=drawn), torch.randn(44, 1, generator=drawn))
    results = []
    for attempts in ([6], [3, 6]):
        place = folder / f"{len(attempts)}"
        for last in attempts:
            torch.manual_seed(0)
            model = world.replicate(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            loader = Loader(data, 8, world, shuffle=True)
            checkpoints = Checkpointer(place, world, m=model, optimizer=optimizer, loader=loader)
            step = checkpoints.restore()
            while step < last:
                for inputs, targets in loader:
                    optimizer.zero_grad()
                    (model(inputs) - targets).square().mean().backward()
                    optimizer.step()
                    step += 1
                    if step == last:
                        checkpoints.save(step)
                        break
        model.eval()
        results.append(model(data.tensors[0]).detach())
    assert torch.equal(*results)
    assert torch.equal(*world.gather(results[0])), "the ranks evaluate different models"
    world.leave()


def test_replicas_share_the_statistics_that_they_save(tmp_path: Path) -> None:
    together(2, _train_with_batchnorm, tmp_path)
