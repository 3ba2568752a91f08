"""A run ends by itself when its job is about to, and when another attempt has taken its place."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkout import PACED, ROOT
from disks import until
from ranks import Ranks, logged_steps, train

from rollcall.messages.refusal import FENCED
from rollcall.records.run import Validation
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines, write_atomic
from rollcall.train.ranks.deadline import LOOK, MARGIN


def wait_for(event: str, run: RunDir, count: int) -> None:
    end = time.monotonic() + 500
    while sum(line["event"] == event for line in read_lines(run.events)) < count:
        assert time.monotonic() < end, f"no {event}"
        time.sleep(0.05)


@pytest.mark.long
def test_a_second_attempt_fences_the_first_one_off_and_leaves_in_time(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "it")
    words = ["device=cpu", "train.steps=1000000", "checkpoint.every=20", "run.name=it", PACED]
    command = [sys.executable, "-m", "train", *words, f"run.root={tmp_path}"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=ROOT, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )

    with start() as first:
        wait_for("checkpointed", run, 1)
        with start() as second:
            wait_for("first_step", run, 2)
            errors = first.communicate(timeout=500)[1]
            assert first.returncode == FENCED, errors
            assert "another attempt of run it has begun: this one ends" in errors
            assert run.read_verdict() is None
            run.job.mkdir()
            # Seen in time, it leaves the save ten seconds.
            end = time.time() + MARGIN + LOOK
            write_atomic(run.job / "deadline.json", json.dumps({"end": end}))
            errors = second.communicate(timeout=500)[1]
            assert second.returncode == os.EX_TEMPFAIL, errors
    verdict = run.read_verdict()
    assert verdict is not None
    assert (verdict.state, verdict.reason) == ("requeue", "the end of the job is near")
    assert (run.checkpoints / f"step-{verdict.step:08d}").is_dir()


def test_an_attempt_that_stood_still_at_its_start_does_not_take_the_run_back(
    tmp_path: Path,
) -> None:
    run = RunDir(tmp_path, "it")
    run.log(1, 0, 0).parent.mkdir(parents=True)
    run.path.chmod(0o700)
    run.claim(1)
    words = ["digits", "device=cpu", "train.steps=1", "run.name=it", f"run.root={tmp_path}"]
    late = Ranks(2, words, run.log(0, 0, 0).parent)
    assert late.wait() == [FENCED, FENCED], late.output()
    assert "another attempt of run it has begun: this one ends" in late.output()
    run.check_claim()
    assert not run.config.exists()


def test_a_stop_does_not_wait_for_the_whole_validation(tmp_path: Path) -> None:
    run, gate = RunDir(tmp_path, "it"), tmp_path / "gate"
    data = ["data.name=synthetic_images", "data.image_size=8", "data.num_samples=16000"]
    own = ["model.name=user_code:gated", "device=cpu", "train.steps=3", "log.every=1"]
    words = [*data, *own, "data.global_batch=8", "run.name=it", f"run.root={tmp_path}"]
    # After three passes of the check, two that count operations, two without an update and three
    # steps; the validation has four.
    ranks = Ranks(2, words, tmp_path / "logs", {"GATE": f"11:300:{gate}"})
    try:
        until(lambda: len(logged_steps(run)) == 3)
        ranks.processes[1].terminate()
        gate.touch()
        assert ranks.wait() == [os.EX_TEMPFAIL] * 2, ranks.output()
    finally:
        ranks.kill()
    assert not [line for line in read_lines(run.events) if line["event"] == "evaluated"]
    assert train(2, words, tmp_path / "logs").count("validation loss") == 2
    steps = [line["step"] for line in read_lines(run.events) if line["event"] == "evaluated"]
    assert steps == [3]


def test_a_finished_run_that_is_started_again_has_one_final_validation(tmp_path: Path) -> None:
    words = ["digits", "device=cpu", "train.steps=3", "run.name=it", f"run.root={tmp_path}"]
    for more in ([], ["train.metrics=user_tasks:margin"]):
        train(1, [*words, *more], tmp_path / "logs")
    [line] = Validation.read(tmp_path / "it")
    assert (line.step, "val_margin" in line.more) == (3, True)
