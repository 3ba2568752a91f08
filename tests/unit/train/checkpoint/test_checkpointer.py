"""The library's checkpoints: nothing is lost silently, and wrong calls are refused in words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from checkpoints import restored, save
from torch import nn

from rollcall.config import ConfigError
from rollcall.train.checkpoint.checkpointer import Checkpointer
from rollcall.train.checkpoint.engine import Engine
from rollcall.train.checkpoint.store import CheckpointStore
from rollcall.train.ranks.world import World

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda of: torch.optim.AdamW(of, lr=0.1, amsgrad=True),
    "NAdam": lambda of: torch.optim.NAdam(of, lr=0.1),
    "SGD": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9, weight_decay=0.1),
    "plain SGD": lambda of: torch.optim.SGD(of, lr=0.1),
    "Rprop": lambda of: torch.optim.Rprop(of, lr=0.1),
}


class Net(nn.Module):
    """The second layer is used from step 3 on, or always; the third never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late, self.never = (nn.Linear(4, 4) for _ in range(3))


class Loop:
    """A model, its optimizer, a schedule and a dictionary, as one writes them."""

    def __init__(self, directory: Path, world: World, optimizer: str = "AdamW") -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer: torch.optim.Optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], 0.5)
        self.own: dict[str, Any] = {"average": torch.zeros(4), "note": {"best": 0.0, 1: 0}}
        self.checkpoints = Checkpointer(
            directory,
            world,
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            own=self.own,
        )

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            outputs = self.model.first(inputs)
            # Of these two, the state of a parameter that had no gradient yet is not zero.
            if step >= 3 or isinstance(self.optimizer, torch.optim.NAdam | torch.optim.Rprop):
                outputs = outputs + self.model.late(inputs)
            loss = outputs.square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.own["average"] += outputs.detach().mean(0)
            self.own["note"] = {"best": loss.item(), 1: step}
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("at", [0, 2, 5])
def test_training_continues_as_if_it_had_never_stopped(
    tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str], optimizer: str, at: int
) -> None:
    undisturbed = Loop(tmp_path, world, optimizer)
    undisturbed.checkpoints.restore()
    assert capsys.readouterr().out == ""
    undisturbed.train(0, at)
    undisturbed.checkpoints.save(at)
    expected = undisturbed.train(at, 8)

    resumed = Loop(tmp_path, world, optimizer)
    assert resumed.checkpoints.restore() == at
    assert capsys.readouterr().out == f"rollcall: continues from {tmp_path}/step-{at:08d}\n"
    found = resumed.train(at, 8)
    assert found == expected
    assert torch.equal(resumed.own["average"], undisturbed.own["average"])
    assert resumed.own["note"] == undisturbed.own["note"]


def test_options_come_from_the_checkpoint_until_they_are_set(tmp_path: Path, world: World) -> None:
    """As with torch's load_state_dict: a schedule continues from the rate that it has reached."""
    model = nn.Linear(2, 2)
    first = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.2)
    checkpoints = Checkpointer(tmp_path, world, model=model, optimizer=first)
    checkpoints.restore()
    checkpoints.save(1)
    other = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    assert Checkpointer(tmp_path, world, model=model, optimizer=other).restore() == 1
    [group] = other.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.2)
    group["lr"] = 0.1
    before = model.bias.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    other.step()
    assert (before * (1 - 0.1 * 0.2) - model.bias).tolist() == pytest.approx([0.1, 0.1])


def test_saving_between_backward_and_step_changes_nothing(tmp_path: Path, world: World) -> None:
    loop = Loop(tmp_path, world)
    loop.checkpoints.restore()
    loop.model.first(torch.ones(1, 4)).sum().backward()
    gradient = loop.model.first.weight.grad
    loop.checkpoints.save(0)
    assert loop.model.first.weight.grad is gradient and not loop.optimizer.state


def test_a_state_that_would_lose_the_moments_is_refused(tmp_path: Path, world: World) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = Engine(CheckpointStore(tmp_path, world))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    def obvious(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}

    save(engine, 1, obvious(optimizer))
    fresh = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match=r"holds optimizer\.state\.0\.step.*would lose"):
        restored(engine, obvious(fresh))


def test_a_part_that_is_missing_on_either_side_is_refused(tmp_path: Path, world: World) -> None:
    loop = Loop(tmp_path, world)
    loop.checkpoints.restore()
    loop.train(0, 1)
    loop.checkpoints.save(1)
    fewer = Checkpointer(tmp_path, world, model=loop.model)
    with pytest.raises(ConfigError, match=r"optimizer\.state\..* more, but the state to fill"):
        fewer.restore()
    parts: dict[str, Any] = {
        "model": loop.model,
        "optimizer": loop.optimizer,
        "schedule": loop.schedule,
    }
    more = Checkpointer(tmp_path, world, **parts, own=loop.own, other={"x": 1})
    with pytest.raises(ConfigError, match=r"it has no value other\.x"):
        more.restore()


def test_wrong_calls_are_refused_in_words(tmp_path: Path, world: World) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(TypeError, match="nothing to save"):
        Checkpointer(tmp_path, world)
    with pytest.raises(ValueError, match="keep=0: expected at least 1, the newest checkpoint"):
        Checkpointer(tmp_path, world, keep=0, model=model)
    with pytest.raises(TypeError, match="step is a int"):
        Checkpointer(tmp_path, world, step=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer changes 2 parameters that no given model has"):
        Checkpointer(
            tmp_path, world, model=model, optimizer=torch.optim.SGD(other.parameters(), lr=1)
        )
    checkpoints = Checkpointer(tmp_path, world, model=model)
    with pytest.raises(RuntimeError, match=r"call restore\(\) before save\(\)"):
        checkpoints.save(1)
    checkpoints.restore()
    checkpoints.save(5, wait=False)
    checkpoints.save(6, wait=False)  # waits for the one before it
    with pytest.raises(ValueError, match="step 6 is saved already"):
        checkpoints.save(5)
    checkpoints.close()

    engine = Engine(CheckpointStore(tmp_path, world))
    engine.begin(7, {"x": torch.ones(1)})
    assert torch.tensor(engine.signals()).dtype == torch.float32  # booleans cannot be summed
    with pytest.raises(RuntimeError, match="the save of step 7 is still in flight"):
        engine.begin(8, {"x": torch.ones(1)})
    engine.drain()


def test_a_failed_save_in_the_background_is_heard(tmp_path: Path, world: World) -> None:
    checkpoints = Checkpointer(tmp_path / "here", world, model=nn.Linear(2, 2))
    checkpoints.restore()
    checkpoints.save(1)
    (tmp_path / "here").rename(tmp_path / "away")
    (tmp_path / "here").touch()
    checkpoints.save(2, wait=False)
    with pytest.raises(OSError, match="step 2 was not saved: "):
        checkpoints.close()


SCRIPT = """
import os, sys
import torch
from rollcall import Checkpointer, World

for how in ("forgotten", "exception"):  # each in a process that goes on below
    if not (child := os.fork()):
        break
    os.waitpid(child, 0)
else:
    sys.exit()
os.mkdir(how)
os.chdir(how)
os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT), 2)
world = World.join("cpu")
checkpoints = Checkpointer("here", world, model=torch.nn.Linear(2, 2))
checkpoints.restore()
if how == "forgotten":
    checkpoints.save(1, wait=False)
else:
    with checkpoints:
        checkpoints.save(1, wait=False)
        raise KeyError("a mistake")
"""


def test_an_unfinished_save_is_finished_or_named(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, env=env, check=True, timeout=500)
    for how in ("forgotten", "exception"):
        said = (tmp_path / how / "said").read_text()
        is_named = "the last save in the background was not finished" in said
        assert is_named == (how == "forgotten"), said
        assert ("KeyError: 'a mistake'" in said) == (how == "exception"), said
        saved = tmp_path / how / "here" / "step-00000001"
        assert saved.exists() == (how == "exception")
