"""Signs of life of real processes and threads, and the questions of those that watch them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from checkout import ROOT

from rollcall.launch.node import heartbeat
from rollcall.launch.node.heartbeat import Heartbeats
from rollcall.launch.node.identity import Node
from rollcall.launch.node.monitor import NodeMonitor
from rollcall.launch.node.pulse import Pulse, ask
from rollcall.launch.node.rendezvous import Meeting
from rollcall.messages.refusal import RefusedError
from rollcall.records.attempt import Heartbeat, NodeFailure
from rollcall.records.run_dir import RunDir

BEATS = """
import sys, time
from pathlib import Path
from rollcall.launch.node.pulse import Pulse
from rollcall.records.attempt import Heartbeat
pulse = Pulse(Heartbeat(Path(sys.argv[1])), 0.1, "")
time.sleep(600)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path, "it")
    run.job.mkdir(parents=True)
    return run


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats that are quick to suspect others."""
    for name, value in (("EVERY", 0.01), ("SELDOM", 0.01), ("SUSPICION", 0.2), ("DOUBT", 0.1)):
        monkeypatch.setattr(heartbeat, name, value)
    monkeypatch.setattr(heartbeat, "ASK_EVERY", 0.1)


def node(number: int, count: int) -> Node:
    return Node(number, count, (socket.gethostname(),) * count, "7", "7.0.0", None, 1)


def until(is_so: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    return bool(psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    until(lambda: is_stopped(process))


@pytest.fixture
def process(run: RunDir) -> Iterator[tuple[subprocess.Popen[bytes], Heartbeat]]:
    """A process with a pulse, and its heartbeat as others read it."""
    path = run.job / "heartbeats" / "7.0.0" / "node-1"
    process = subprocess.Popen([sys.executable, "-c", BEATS, str(path)], cwd=ROOT)
    watched = Heartbeat.of_node(run.path, "7.0.0", 1)
    try:
        until(lambda: watched.read(is_doubted=True) != b"")
        yield process, watched
    finally:
        process.kill()
        process.wait()


def test_a_process_answers_is_silent_when_stopped_and_refuses_when_dead(
    process: tuple[subprocess.Popen[bytes], Heartbeat],
) -> None:
    other, watched = process
    count = watched.read()
    until(lambda: watched.read() != count)
    assert ask(watched.address) == "alive"
    stop(other)
    assert ask(watched.address) == "frozen"
    other.send_signal(signal.SIGCONT)
    until(lambda: ask(watched.address) == "alive")
    other.kill()
    other.wait()
    assert ask(watched.address) == "refused"


def test_another_process_at_the_port_is_not_taken_for_the_node(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    pulse = Pulse(Heartbeat(path), 60.0, "")
    watched = Heartbeat(path)
    watched.read()
    host, port, key = watched.address.split()
    assert ask(watched.address) == "alive"
    assert ask(f"{host} {port} {'00' * 16}") == "refused", "another key"
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"garbage of the wrong length, and without an end")
        assert ask(watched.address) == "alive"
    pulse.end()
    with socket.create_server((host, int(port))) as server:
        server.settimeout(0.0)
        assert ask(watched.address) == "frozen"
    for text in ("", "a b", f"{host} x {key}"):
        assert ask(text) == "unreachable"


def test_only_a_writer_makes_the_folder(tmp_path: Path) -> None:
    watched = Heartbeat.of_node(tmp_path, "7.0.0", 1)
    assert watched.read() == b""
    Pulse(Heartbeat.of_node(tmp_path, "7.0.0", 1), 60.0).end()
    assert list(tmp_path.iterdir()) == [], "a run that was removed is not made again"
    (tmp_path / "job").mkdir()
    Pulse(Heartbeat.of_node(tmp_path, "7.0.0", 1), 60.0).end()
    assert watched.read() == b"0over   "


@pytest.mark.usefixtures("soon")
def test_a_dead_node_is_missed_and_one_that_has_ended_is_not(run: RunDir) -> None:
    head, *others = (Heartbeats(run, node(number, 3)) for number in range(3))

    def missed(seconds: float) -> int | None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (silent := head.look()[0]) is not None:
                return silent
            time.sleep(0.01)
        return None

    assert missed(0.5) is None, "their threads beat, whatever their main threads do"
    others[1].end(has_failed=False)
    assert missed(0.5) is None
    pulse = others[0]._pulse
    assert pulse is not None
    pulse.end(is_over=False)  # as if it were killed
    assert missed(20) == 1
    head.end(has_failed=False)


@pytest.mark.usefixtures("soon")
def test_a_node_that_never_begins_is_missed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEGIN", 0.2)
    head = Heartbeats(run, node(0, 2))
    until(lambda: head.look()[0] == 1)
    head.end(has_failed=False)


@pytest.mark.usefixtures("soon")
def test_a_node_refutes_the_report_that_it_is_lost(run: RunDir) -> None:
    """Its neighbour neither reaches it nor sees its count, and the ranks of both train on."""
    meetings = [Meeting(run, node(number, 2)) for number in range(2)]
    ours, other = (NodeMonitor(run, meeting.node, meeting) for meeting in meetings)
    meetings[0].report_lost(1)
    ours.listen(0.0)
    other.listen(0.0)
    assert meetings[0].failure() is None
    assert (ours.failure, other.failure) == (None, None)
    until(lambda: [ours.listen(0.01), ours.failure] == [False, None])
    # A report that nobody refutes is believed.
    meetings[0].report_lost(1)
    until(lambda: [ours.listen(0.01), ours.has_lost] == [False, True])
    NodeFailure.path_in(run.path, key=meetings[0].key).unlink()
    for monitor in (ours, other):
        monitor.end()


@pytest.mark.parametrize("text", ["soon", "0", "-3", "inf", "nan"])
def test_a_wrong_timeout_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(heartbeat.TIMEOUT, text)
    with pytest.raises(RefusedError, match=f"{heartbeat.TIMEOUT}: expected a number of seconds"):
        heartbeat.patience()


def test_a_site_sets_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(heartbeat.TIMEOUT, "120")
    assert heartbeat.patience() == 120.0
