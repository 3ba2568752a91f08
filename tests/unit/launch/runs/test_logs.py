"""Logs are merged by the time at which they grew, which the supervisors note beside them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollcall.cli import program as cli
from rollcall.launch.commands import logs
from rollcall.launch.runs.output import LogWatcher, Output, nodes_of_ranks
from rollcall.records.attempt import LogSizes
from rollcall.records.run_dir import RunDir

ATTEMPT = 1


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Four ranks on two nodes whose lines came in turns; one line came in two halves."""
    run = RunDir(tmp_path, "it")
    (run.job).mkdir(parents=True)
    texts: dict[int, bytes] = dict.fromkeys(range(4), b"")
    rounds = [(0, b"a\nb"), (3, b"c\n"), (0, b"b\n"), (2, b"d\n"), (1, b"e\n"), (3, b"f\n")]
    for time, (rank, text) in enumerate(rounds):
        texts[rank] += text
        log = run.log(ATTEMPT, rank // 2, rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(texts[rank])
        LogSizes(float(time), {str(rank): len(texts[rank])}).append(log.parent)
    with run.log(ATTEMPT, 1, 2).open("a") as file:
        file.write("no stamp yet")
    return run


TRACEBACK = "[rank0]: Traceback (most recent call last):\n[rank0]: OSError\n"


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_traceback_is_shown_once_it_is_clear_whose_fault_it_is(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], is_wanted: bool
) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(f"step 1\n{TRACEBACK}")
    output = Output([log], hold=1000)
    output.show()
    output.show()
    assert capfdbinary.readouterr().out == b"step 1\n"
    output.show_rest(is_wanted)
    folded = f"rank 0 lost the others; its traceback: {log}\n"
    assert capfdbinary.readouterr().out.decode() == (TRACEBACK if is_wanted else folded)


def test_a_program_that_prints_a_traceback_and_goes_on_is_shown(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(TRACEBACK)
    output = Output([log], is_local=True, hold=-1)  # it is over at once
    output.show()
    with log.open("a") as file:
        file.write("step 2\n")
    log.unlink()  # a local file is opened once, for the sake of its file server
    output.show()
    assert capfdbinary.readouterr().out.decode() == f"{TRACEBACK}step 2\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "a bb"),
        (["--rank", "3"], "c f"),
        (["--merge"], "0:a 3:c 0:bb 2:d 1:e 3:f 2:no_stamp_yet"),
        (["--node", "1"], "3:c 2:d 3:f 2:no_stamp_yet"),
        (["--node", "1", "--rank", "2"], "d no_stamp_yet"),
        (["--attempt", "1"], "a bb"),
    ],
)
def test_chosen_and_merged(
    run: RunDir, options: list[str], expected: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert logs.main([run.name, "--root", str(run.path.parent), *options]) == 0
    shown = capfdbinary.readouterr().out.decode().splitlines()
    short = [line.replace("[rank ", "").replace("] ", ":").replace(" ", "_") for line in shown]
    assert short == expected.split()


def test_on_a_terminal_ranks_have_colours(
    run: RunDir, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert logs.main([run.name, "--root", str(run.path.parent), "--merge"]) == 0
    shown = capfdbinary.readouterr().out.splitlines()
    assert shown[:2] == [b"\x1b[36m[rank 0]\x1b[0m a", b"\x1b[35m[rank 3]\x1b[0m c"]
    monkeypatch.setenv("NO_COLOR", "1")
    assert logs.main([run.name, "--root", str(run.path.parent), "--merge"]) == 0
    assert capfdbinary.readouterr().out.startswith(b"[rank 0] a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", "4"], "attempt 1 of run it has no such log; it has ranks 0 to 3 on nodes 0 to"),
        (["--attempt", "0"], "run it has no attempt 0; the newest is 1"),
    ],
)
def test_what_is_not_there(
    run: RunDir, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["logs", run.name, "--root", str(run.path.parent), *options]) == 2
    assert message in capsys.readouterr().err


def test_only_what_has_grown_is_noted(tmp_path: Path) -> None:
    node = tmp_path / "node-0"
    node.mkdir()
    watcher = LogWatcher(node)
    (node / "rank-0.log").write_text("")
    (node / "rank-0.old.log").write_text("a file of the user's")
    path = node / "rank-1.log"
    with (
        path.open("ab") as log,
        subprocess.Popen(["sh", "-c", "printf one; exec sleep 600"], stdout=log) as rank,
    ):
        while path.stat().st_size < 3:
            assert rank.poll() is None
        watcher.look([rank.pid, os.getpid()])
        log.write(b", two")
        log.flush()
        watcher.look([rank.pid])  # too early
        rank.kill()
    watcher.end()
    watcher.end()
    assert [line.sizes for line in LogSizes.read(node)] == [{"1": 3}, {"1": 8}]
    assert nodes_of_ranks(tmp_path) == {0: 0, 1: 0}
