"""A run ends by itself when its job is about to, and when another attempt has taken its place."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from train.deadline import MARGIN
from train.run import RunDir, read_lines

ROOT = Path(__file__).parents[2]


def wait_for(event: str, run: RunDir, count: int) -> None:
    end = time.monotonic() + 90
    while sum(line["event"] == event for line in read_lines(run.events)) < count:
        assert time.monotonic() < end, f"no {event}"
        time.sleep(0.05)


def test_a_second_attempt_fences_the_first_one_off_and_leaves_in_time(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "it")
    words = ["device=cpu", "train.steps=1000000", "checkpoint.every=20", "run.name=it"]
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
            errors = first.communicate(timeout=60)[1]
            assert first.returncode == 2, errors
            assert "another attempt of run it has begun: this one ends" in errors
            assert run.read_verdict() is None
            run.job.mkdir()
            (run.job / "deadline.json").write_text(json.dumps({"end": time.time() + MARGIN}))
            errors = second.communicate(timeout=60)[1]
            assert second.returncode == os.EX_TEMPFAIL, errors
    verdict = run.read_verdict()
    assert verdict is not None
    assert (verdict.state, verdict.reason) == ("requeue", "the end of the job is near")
    assert (run.checkpoints / f"step-{verdict.step:08d}").is_dir()
