"""The time of a run by its use, compared with a clock outside and the logs of the ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from checkout import ROOT

from rollcall.launch.commands.goodput import main
from rollcall.launch.runs import states
from rollcall.launch.runs.goodput import goodput
from rollcall.records.phases import Phases
from rollcall.records.run_dir import RunDir

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]
MODEL = """
import os, pathlib, signal, time
import torch

# All ranks are killed, which repeats steps; one of two, which does not; the last signal preempts.
PLANNED = {17: (signal.SIGKILL, "01"), 34: (signal.SIGKILL, "1"), 43: (signal.SIGUSR1, "1")}

class Slow(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
        self.passes = None

    def forward(self, inputs):
        if self.training and torch.is_grad_enabled() and inputs.shape[0] == 8:
            time.sleep(float(os.environ["STEP"]))
            self.count()
        return super().forward(inputs.flatten(1))

    def count(self):
        if self.passes is None:
            saved = pathlib.Path(os.environ["SAVED"]).glob("step-*")
            self.passes = max((int(path.name[5:]) for path in saved), default=0)
        self.passes += 1
        rank, (number, ranks) = os.environ["RANK"], PLANNED.get(self.passes, (None, ""))
        done = pathlib.Path(os.environ["SAVED"]).parent / f"planned-{self.passes}-{rank}"
        if rank in ranks and not done.exists():
            done.touch()
            time.sleep(1)  # it hangs: nothing is done, until it is killed
            os.kill(os.getpid(), number)
"""
KEYS = ["digits", "model.name=slow:Slow", "data.global_batch=16", "train.steps=60", "log.every=1"]
KEYS += ["checkpoint.every=10", "train.evaluate_every=null"]
STEP = float(os.environ.get("GOODPUT_STEP", "0.05"))
"""Seconds of a step; GOODPUT_STEP=3 makes a run of about five minutes."""
PAUSE = 4.0


@pytest.mark.long
def test_every_second_of_a_run_with_two_kills_and_a_preemption_is_booked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "runs", "a")
    (tmp_path / "slow.py").write_text(MODEL)
    monkeypatch.setenv("SAVED", str(run.checkpoints))
    monkeypatch.setenv("STEP", str(STEP))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    words = [*SUBMIT, "--local", "--nproc-per-node=2", "--wait", "--name=a", "--max-restarts=3"]
    began = time.time()
    first = subprocess.run([*words, *KEYS], cwd=tmp_path, capture_output=True, text=True)
    assert first.returncode == 75, first.stdout + first.stderr
    time.sleep(PAUSE)
    again = subprocess.run(
        [*words, "--resume", *KEYS], cwd=tmp_path, capture_output=True, text=True
    )
    outside = time.time() - began
    assert again.returncode == 0, again.stdout + again.stderr
    found = goodput(run, states.look([run])[0][0])
    assert found is not None
    shares = found.shares
    assert sum(shares.values()) == pytest.approx(found.wall, rel=1e-6)
    # The start and the end of both `submit` themselves are outside.
    said = f"{outside:.2f} s by a clock outside, {found.wall:.2f} s by the records: {shares}"
    with capsys.disabled():
        print(said)
    assert outside - found.wall >= 0, (outside, found)
    logs = [run.log(number, 0, 0).read_text() for number in range(found.attempts)]
    done = Counter(int(step) for log in logs for step in re.findall(r"step (\d+)/60  loss", log))
    saved = {line["step"] for line in run.read_events("rescued")}
    assert (found.attempts, sorted({*done, *saved})) == (4, [*range(1, 61)])
    # Of each kill, the last step may have been done, but not printed.
    assert 0 <= found.repeated_steps - (done.total() - 60) <= 2
    # Each share has at least the time that its steps and pauses slept; together they are the wall
    # time, so what one has too little another one would have too much.
    assert found.repeated_steps >= 5, done
    assert shares["repeated"] > found.repeated_steps * STEP * 0.8
    assert shares["productive"] > 60 * STEP * 0.8
    assert shares["lost"] > 2  # both hung for a second
    assert shares["restart"] > PAUSE
    steps = [line.step for line in Phases.read(run.path)]
    assert steps == sorted({*steps}) and steps[-1] == 60, steps
    assert main(["--json", "--root", str(tmp_path / "runs"), "a"]) == 0
    assert json.loads(capsys.readouterr().out)["shares"] == shares
