"""A training on a terminal: its first word, Ctrl-C before it can save, and a run that is done."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkout import ROOT
from ranks import alone

from rollcall.system.hosts import free_port

WORDS = ["digits", "model.name=mlp", "device=cpu", "train.steps=2", "train.evaluate_every=null"]
TRAIN = [sys.executable, "-m", "rollcall", "train", *WORDS]
TORCHRUN = [sys.executable, str(ROOT / "env/bin/torchrun"), "--nproc_per_node=1", "-m", "train"]


@pytest.mark.parametrize("command", [TRAIN, [*TORCHRUN, *WORDS]], ids=["train", "torchrun"])
def test_ctrl_c_during_the_imports_says_how_to_go_on(tmp_path: Path, command: list[str]) -> None:
    ours, theirs = pty.openpty()

    def on_terminal() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where pytest runs in the background
        os.login_tty(os.dup(theirs))

    words = [*command, f"run.root={tmp_path}", "run.name=a"]
    with subprocess.Popen(words, cwd=ROOT, preexec_fn=on_terminal) as training:
        os.close(theirs)
        shown = b""
        while b"importing PyTorch" not in shown:
            shown += os.read(ours, 1000)
        os.write(ours, b"\x03")  # as a person types it
        while training.poll() is None or b"to continue" not in shown:
            try:
                shown += os.read(ours, 1000)
            except OSError:  # it has ended
                break
    os.close(ours)
    assert training.returncode == os.EX_TEMPFAIL, shown.decode()
    assert b"stopped" in shown and b"the same command" in shown and b"Traceback" not in shown


SWALLOWS = """
import os, signal, sys
from rollcall.cli.program import run

class Interrupter:
    def find_spec(self, name, *_):
        if name == "numpy" and self in sys.meta_path:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
signal.signal(signal.SIGINT, signal.default_int_handler)
run()
"""
"""torch imports NumPy in C code, which goes on without it whatever happens there."""


def test_ctrl_c_while_torch_imports_numpy_is_not_lost(tmp_path: Path) -> None:
    words = ["train", *WORDS, f"run.root={tmp_path}", "run.name=a"]
    command = [sys.executable, "-c", SWALLOWS, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == os.EX_TEMPFAIL, done.stderr
    assert "the same command" in done.stderr and not (tmp_path / "a").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_rank_that_waits_for_another_ends_at_once(tmp_path: Path, number: signal.Signals) -> None:
    """Also at a closed terminal; torch waits for five minutes, and looks at no signal."""
    port = str(free_port())
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    log = tmp_path / "log"
    rank = alone([*WORDS, f"run.root={tmp_path}"], log, **place, MASTER_PORT=port)
    while True:  # until it listens: nobody else will come
        with socket.socket() as caller:
            if caller.connect_ex(("127.0.0.1", int(port))) == 0:
                break
        assert rank.is_alive(), log.read_text()
        time.sleep(0.05)
    assert rank.pid is not None
    os.kill(rank.pid, number)
    rank.join(100)
    assert rank.exitcode == os.EX_TEMPFAIL
    assert "stopped without saving" in log.read_text()


def test_a_finished_run_says_that_there_is_nothing_to_do(tmp_path: Path) -> None:
    said = []
    for log in (tmp_path / "first", tmp_path / "second"):
        training = alone([*WORDS, f"run.root={tmp_path}", "run.name=a"], log)
        training.join(500)
        said.append(log.read_text())
        assert training.exitcode == 0, said
    assert "done: 2 steps trained" in said[0] and "samples/s" in said[0]
    assert "done: nothing to do: 2 steps trained already" in said[1]
    assert "samples/s" not in said[1]
    assert "PyTorch" not in said[1]  # a file gets no progress
