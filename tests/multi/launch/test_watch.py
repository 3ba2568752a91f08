"""`rollcall watch` on a real terminal, beside a run of which a rank is really killed."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from checkout import ROOT
from disks import until

from rollcall.records.run import LoggedStep
from rollcall.records.run_dir import RunDir

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py"), "--local", "--nproc-per-node=2"]
KEYS = ["digits", "model.name=mlp", "device=cpu", "train.steps=1000000", "log.every=1"]
KEYS += ["parallel.strategy=zero3"]  # with replicas the newest step would be saved, and none lost
# Without news, this would draw the screen once in an hour.
WATCH = """
import sys
from rollcall.launch.commands import status, watch
status.REDRAW = 3600
sys.exit(watch.main(["a", "--root", sys.argv[1]]))
"""


@pytest.mark.long
def test_a_killed_rank_and_the_lost_steps_are_shown_at_once_and_q_ends(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "a")
    words = [f"--root={tmp_path}", "--name=a", "--max-restarts=3", *KEYS, "checkpoint.every=20"]
    submit = subprocess.Popen([*SUBMIT, "--wait", *words], cwd=tmp_path, stdout=subprocess.DEVNULL)
    ours, theirs = pty.openpty()
    before, watching = termios.tcgetattr(theirs), None
    try:
        until(lambda: bool(run.read_events("checkpointed")), 600)
        until(lambda: LoggedStep.last(run.path)[-1].step % 20 > 5, 600)
        watching = subprocess.Popen(
            [sys.executable, "-c", WATCH, str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
            stdin=theirs,
            stdout=theirs,
            preexec_fn=lambda: os.login_tty(os.dup(theirs)),
        )
        shown = read_until(ours, b"attempt     0: 2 ranks on ")
        kill = [sys.executable, "-m", "rollcall.tools.drill.on_node", "kill-rank"]
        kill += [str(run.attempt_logs(0)), "1"]
        subprocess.run(kill, cwd=ROOT, check=True)
        shown = read_until(ours, b"steps lost")
        text = shown.decode()
        assert "rank 1 on " in text and "was ended by SIGKILL" in text
        assert text.index("was ended by SIGKILL") < text.index("attempt 1 started")
        assert "attempt     1: 2 ranks on " in text
        os.write(ours, b"q")
        assert watching.wait(60) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        if watching is not None:
            watching.kill()
            watching.wait()
        cancel = [sys.executable, "-m", "rollcall", "cancel", "a", f"--root={tmp_path}"]
        subprocess.run(cancel, cwd=ROOT, stdout=subprocess.DEVNULL)
        submit.wait()  # the run would go on without it
        os.close(ours)
        os.close(theirs)


def read_until(terminal: int, wanted: bytes) -> bytes:
    """Read what the terminal shows until this is in it."""
    shown, end = b"", time.monotonic() + 120
    while wanted not in shown:
        ready = select.select([terminal], [], [], end - time.monotonic())[0]
        assert ready, shown.decode(errors="replace")
        shown += os.read(terminal, 4096)
    return shown
