"""Every file of a run directory is written and read by its record, whatever a reader finds."""

from __future__ import annotations

import ast
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkout import CAMPAIGNS, HELPERS, ROOT

from rollcall.launch.commands import status, why
from rollcall.records import run_dir
from rollcall.records.attempt import (
    AttemptEvent,
    AttemptRecord,
    GaveUp,
    Heartbeat,
    LogSizes,
    NodeFailure,
    NodeState,
    NoMoreRounds,
    RankEnd,
    RankFailure,
    Rendezvous,
    new_attempt,
)
from rollcall.records.job import (
    BatchRecord,
    Cancellation,
    Cell,
    JobRecord,
    Restart,
    Submission,
    local_output,
    slurm_output,
    submitted_script,
)
from rollcall.records.run import (
    CLAIM,
    EVENTS,
    ForgottenStep,
    JobEnd,
    Line,
    LoggedStep,
    Record,
    Validation,
    Verdict,
    Whole,
)
from rollcall.records.run_dir import FencedError, RunDir
from rollcall.system.files import read_lines, read_object, tail, write_atomic, write_once

LINES: list[Line] = [
    LoggedStep(3, 0.5, 100.0, 7.0, 0.1, {"learning_rate": 0.01}),
    Submission("7", 1.0, ["--nodes", "2"], "/here", {"python": "3.11"}),
    AttemptEvent(0, "7", "started", 1.0, hosts=["n1", "n2"], ranks=4),
    Restart(1.0, "7", "lost node", 10, ["n2"]),
    Cancellation(["7", "8"], 1.0),
    LogSizes(1.0, {"0": 10, "1": 20}),
    RankEnd(1.0, 3, 137),
]
FILES: list[tuple[Whole, dict[str, object]]] = [
    (Verdict("done", 7, "7 steps trained"), {}),
    (JobEnd(1e9), {}),
    (JobRecord("/runs/it", 4, False, 1, 2, {"options": {"qos": None}}), {}),
    (BatchRecord("7.0", 1, ["srun", "true"], "/dev/null", False, "n1:pid:[1] 7 99"), {}),
    (NodeState(0, 1, "n2", "failed", 1.0, 99, 2.0, 137), {"attempt": 0, "node": 1}),
    (Rendezvous(0, "n1", "10.0.0.1", 29400, 2), {"key": "7.0.0"}),
    (NoMoreRounds("the head has ended"), {"key": "7.0.0"}),
    (NodeFailure(1, "n2", "silent", True, True), {"key": "7.0.0"}),
    (GaveUp(1, "n2", "no route"), {"key": "7.0.0", "node": 1}),
    (RankFailure(1.0, "n2", 137, "", 1, "agent"), {"who": "agent"}),
]
DEEP = b"[" * 100_000
GARBAGE = [
    *(b"", b"\n", b"null", b"[]", b"[1, 2]", b'"text"', b"7", b"{}", b"{", b"{]", b"\x00" * 64),
    *(b"\xff\xfe\x80binary", b'{"a": 1}', b'{"\xff": 1}', b"9" * 5000, DEEP, b'{"a":' * 100_000),
]


def variants(record: Record) -> list[bytes]:
    """Objects with one key less, or one value of another type, that no reader may accept."""
    found = []
    for name, value in record.as_dict().items():
        if name in type(record).__dataclass_fields__:
            wrong: list[Any] = [{"wrong": []}, [[]]] if not isinstance(value, (list, dict)) else [7]
            found += [json.dumps({**record.as_dict(), name: bad}).encode() for bad in wrong]
    return found


def whole(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.mark.parametrize("record", LINES, ids=lambda record: type(record).__name__)
def test_lines_are_read_as_written_and_garbage_between_them_is_left_out(
    tmp_path: Path, record: Line
) -> None:
    path = tmp_path / record.FILE
    path.parent.mkdir(exist_ok=True)
    assert (type(record).read(tmp_path), type(record).newest(tmp_path)) == ([], None)
    record.append(tmp_path)
    bad = [*GARBAGE[1:], *variants(record)]
    with path.open("ab") as file:
        file.write(b"\n".join(bad))
    assert type(record).read(tmp_path) == [record]
    record.append(tmp_path)
    assert type(record).read(tmp_path) == [record, record]
    assert type(record).newest(tmp_path) == record


@pytest.mark.parametrize(("record", "keys"), FILES, ids=lambda each: type(each).__name__)
def test_files_are_read_as_written_and_garbage_is_no_file(
    tmp_path: Path, record: Whole, keys: dict[str, object]
) -> None:
    kind = type(record)
    assert kind.read(tmp_path, **keys) is None
    path = kind.path_in(tmp_path, **keys)
    path.parent.mkdir(parents=True, exist_ok=True)
    record.write(tmp_path, **keys)
    assert kind.read(tmp_path, **keys) == record
    assert kind.read_all(tmp_path) == {path: record}
    for content in [*GARBAGE, *variants(record), path.read_bytes()[:-3]]:
        path.write_bytes(content)
        assert kind.read(tmp_path, **keys) is None, content[:40]
        assert kind.read_all(tmp_path) == {}
    path.unlink()
    path.mkdir()
    assert kind.read(tmp_path, **keys) is None


def test_unknown_keys_are_ignored_or_kept() -> None:
    more = {"state": "done", "step": 1, "reason": "", "of_a_later_version": 1}
    assert Verdict.parse(more) == Verdict("done", 1, "")
    step = {"step": 1, "loss": 2, "samples_per_second": 3.0, "time": 4.0, "rate": 5}
    assert LoggedStep.parse(step) == LoggedStep(1, 2, 3.0, 4.0, more={"rate": 5})
    assert LoggedStep.parse({**step, "step": True}) is None, "a truth value is not a number"


def test_steps_that_are_repeated_are_dropped(tmp_path: Path) -> None:
    """Once, although a crash came after the first of them was copied."""
    LoggedStep.forget_after(tmp_path, 1)
    for step in (1, 2, 3, 4):
        LoggedStep(step, math.nan, 1.0, 1.0, more={"rate": 1}).append(tmp_path)
    ForgottenStep(3, math.nan, 1.0, 1.0, more={"rate": 1}).append(tmp_path)
    LoggedStep.forget_after(tmp_path, 2)
    assert [line.step for line in LoggedStep.read(tmp_path)] == [1, 2]
    assert [line.step for line in ForgottenStep.read(tmp_path)] == [3, 4]


@pytest.mark.parametrize("content", [b"\n".join(GARBAGE[1:]) + b"\n", b'{"event": 1, "time": 1}\n'])
def test_events_are_read_as_written(tmp_path: Path, content: bytes) -> None:
    run = RunDir(tmp_path, "it")
    run.create()
    run.events.write_bytes(content)
    run.record("started", ranks=2)
    run.record("finished")
    assert [line["event"] for line in run.read_events()] == ["started", "finished"]
    assert [line["ranks"] for line in run.read_events("started")] == [2]


def test_a_claim_that_is_not_ours_fences_us_off(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "it")
    run.create()
    run.claim(None)
    run.check_claim()
    for content in GARBAGE:
        (run.path / CLAIM.format(0)).write_bytes(content)
        with pytest.raises(FencedError):
            run.check_claim()


def test_an_attempt_that_stood_still_while_it_claimed_the_run_does_not_take_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (RunDir(tmp_path, "it") for _ in range(2))
    old.log(3, 0, 0).parent.mkdir(parents=True)

    def stand_still(path: Path, text: str) -> None:
        monkeypatch.setattr(run_dir, "write_atomic", write_atomic)
        new.log(4, 0, 0).parent.mkdir(parents=True)
        new.claim(4)
        write_atomic(path, text)

    monkeypatch.setattr(run_dir, "write_atomic", stand_still)
    old.claim(3)
    new.check_claim()
    with pytest.raises(FencedError):
        old.check_claim()
    by_hand = RunDir(tmp_path, "it")
    by_hand.claim(None)
    by_hand.check_claim()
    with pytest.raises(FencedError):
        new.check_claim()


def test_a_run_whose_logs_were_removed_can_be_claimed(tmp_path: Path) -> None:
    old, new = (RunDir(tmp_path, "it") for _ in range(2))
    old.log(3, 0, 0).parent.mkdir(parents=True)
    old.claim(3)
    shutil.rmtree(old.logs)
    new.log(0, 0, 0).parent.mkdir(parents=True)
    new.claim(0)
    new.check_claim()
    with pytest.raises(FencedError):
        old.check_claim()


def test_cells_are_found_by_their_place_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "job" / Cell.file_name("20300101", 0)
    cells = [Cell("a", ["seed=1"]), Cell("b", [])]
    whole(path, json.dumps([cell.as_dict() for cell in cells]).encode())
    assert Cell.are_in(tmp_path)
    assert [Cell.read(path, index) for index in (0, 1, 2)] == [*cells, None]
    for content in [*GARBAGE, b'[{"name": "a"}]', b'[{"name": 1, "words": []}]']:
        path.write_bytes(content)
        assert Cell.read(path, 0) is None, content[:40]


def test_attempts_are_put_together_from_their_lines(tmp_path: Path) -> None:
    for number in (new_attempt(tmp_path, 0), new_attempt(tmp_path, 0)):
        AttemptEvent(number, "7", "started", 1.0, hosts=["n1"], ranks=2).append(tmp_path)
    AttemptEvent(0, "7", "ended", 2.0, state="failed", exit_code=3).append(tmp_path)
    AttemptEvent(9, "7", "ended", 2.0, state="failed", exit_code=3).append(tmp_path)
    AttemptEvent(8, "7", "started", 2.0, hosts=[], ranks=2).append(tmp_path)
    assert AttemptRecord.read(tmp_path) == [
        AttemptRecord(0, "7", ["n1"], 2, 1.0, "failed", 3, 2.0),
        AttemptRecord(1, "7", ["n1"], 2, 1.0),
    ]


def test_failures_of_an_attempt_know_their_node(tmp_path: Path) -> None:
    for node, time in ((1, 2.0), (0, 3.0)):
        folder = tmp_path / f"node-{node}"
        folder.mkdir()
        RankFailure(time, "n", 1, "", node, f"rank-{node}").write(folder)
    (tmp_path / "node-0" / "rank-7.failed.json").write_bytes(DEEP)
    (tmp_path / "node-other").mkdir()
    found = RankFailure.of_attempt(tmp_path)
    assert [(one.node, one.who) for one in found] == [(1, "rank-1"), (0, "rank-0")]


def test_a_heartbeat_without_a_file_is_empty(tmp_path: Path) -> None:
    heartbeat = Heartbeat.of_batch(tmp_path, "7.0", 1)
    assert (heartbeat.read(), heartbeat.exists()) == (b"", False)
    assert (heartbeat.create(), heartbeat.create()) == (True, False)
    heartbeat.write(b"00000002")
    assert heartbeat.read() == b"00000002"
    assert Heartbeat.of_node(tmp_path, "7.0.0", 1).read() == b""


def test_the_first_to_write_a_file_wins(tmp_path: Path) -> None:
    for text in ("first", "second"):
        write_once(tmp_path / "file", text)
    assert (tmp_path / "file").read_text() == "first"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_what_is_not_there_has_no_lines(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        assert (list(read_lines(path)), read_object(path), tail(path)) == ([], None, [])


@pytest.mark.parametrize("content", [GARBAGE[-1], b"\n".join(GARBAGE), b'{"time": []}\n'])
def test_status_and_why_survive_a_run_full_of_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, content: bytes
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    run = RunDir(tmp_path, "it")
    run.job.mkdir(parents=True)
    files = [record.FILE for record in LINES[:-1]]
    files += [kind.path_in(Path(), **keys).as_posix() for kind, keys in map(described, FILES[:-1])]
    files += [EVENTS, CLAIM.format(0), "config.yaml", "logs/attempt-0/node-0/rank-0.failed.json"]
    for name in files:
        whole(run.path / name, content)
    Submission("7", 1.0).append(run.path)
    AttemptEvent(0, "7", "started", 1.0, hosts=["n1"], ranks=1).append(run.path)
    AttemptEvent(0, "7", "ended", 2.0, state="failed", exit_code=1).append(run.path)
    assert status.main(["--root", str(tmp_path)]) == 0
    assert why.main(["it", "--root", str(tmp_path)]) in (0, 1)
    assert "run it, attempt 0: " in capsys.readouterr().out


def described(each: tuple[Whole, dict[str, object]]) -> tuple[type[Whole], dict[str, object]]:
    return type(each[0]), each[1]


def own_names() -> Iterator[str]:
    """Patterns of the names that only the records may know."""
    job = Path()
    yield from (record.FILE for record in (*LINES, *(record for record, _ in FILES)))
    yield from (EVENTS, Cell.file_name("{at}", 7), local_output(job, "{id}", 7).name)
    yield from (slurm_output(job, "{id}").name, submitted_script(job, "{id}").name)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module with their lines; `*` stands for what is put into one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_no_name_of_a_record_stands_elsewhere() -> None:
    owners = ROOT / "rollcall" / "records"
    names = {name.rpartition("/")[2] for name in own_names()} - {"{key}.json"}  # may be anything
    patterns = (re.sub(r"\\\{\w+\\\}|7", "[^ ]*", re.escape(name)) for name in names)
    known = re.compile(f"(.*/)?({'|'.join(patterns)})")
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for folder in ("rollcall", "env")
        for path in (ROOT / folder).rglob("*.py")
        if path.parent != owners
        for line, text in texts(path)
        if known.fullmatch(text)
    ]
    assert not found


def test_validations_are_in_the_metrics_and_are_forgotten_with_their_steps(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        LoggedStep(step, 0.5, 1.0, 0.0).append(tmp_path)
        Validation(step, 0.25, 0.0, more={"val_top5": 1.0}).append(tmp_path)
    LoggedStep.forget_after(tmp_path, 2)
    assert [line.step for line in LoggedStep.read(tmp_path)] == [1, 2]
    assert [line.step for line in Validation.read(tmp_path)] == [1, 2]
    assert Validation.read(tmp_path)[0].more == {"val_top5": 1.0}
    LoggedStep.forget_validation(tmp_path, 2)
    assert [line.step for line in LoggedStep.read(tmp_path)] == [1, 2]
    assert [line.step for line in Validation.read(tmp_path)] == [1]


def test_what_cannot_be_written_over_is_set_aside(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "it")
    run.create()
    for path in (run.verdict, run.events, run.metrics):
        path.mkdir()
    run.forget_verdict()
    run.conclude(Verdict("done", 1, ""))
    run.record("started")
    LoggedStep(1, 0.5, 1.0, 1.0).append(run.path)
    assert (run.read_verdict(), len(run.read_events()), len(run.read_metrics())) == (
        *(Verdict("done", 1, ""), 1, 1),
    )
    assert len(list(run.path.glob("*.damaged"))) == 3


def test_steps_that_cannot_be_read_are_set_aside_on_a_resume(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        LoggedStep(step, 0.5, 1.0, 1.0).append(tmp_path)
    path = tmp_path / LoggedStep.FILE
    path.write_bytes(before := path.read_bytes().replace(b'"step": 2', b'"step": \xff'))
    LoggedStep.forget_after(tmp_path, 2)
    assert [line.step for line in LoggedStep.read(tmp_path)] == [1]
    assert path.with_name(f"{path.name}.damaged").read_bytes() == before


@pytest.mark.long
def test_a_private_run_of_another_user_leaves_the_others_readable(tmp_path: Path) -> None:
    for name in ("mine", "theirs"):
        run = RunDir(tmp_path, name)
        run.job.mkdir(parents=True)
        Submission("7", 1.0).append(run.path)
        run.log(0, 0, 0).parent.mkdir(parents=True)
        run.log(0, 0, 0).write_text("a line\n")
    (tmp_path / "theirs").chmod(0o000)
    code = (
        "import sys, fuzz_runs; from rollcall.cli import program; fuzz_runs.drop_rights_of_root(); "
    )
    code += "sys.exit(program.main(sys.argv[1:]))"
    root = ["--root", str(tmp_path)]
    train = ["train", "digits", "run.name=theirs", f"run.root={tmp_path}", "device=cpu"]
    for words, expected in (
        (["status", *root], 0),
        (["why", "theirs", *root], 2),
        (["logs", "theirs", *root], 2),
        (["logs", "mine", *root], 0),
        (train, 2),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            env={"PATH": "/nowhere", "PYTHONPATH": f"{ROOT}:{HELPERS}:{CAMPAIGNS}"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == expected and "Traceback" not in done.stderr, done.stderr
        if words[0] == "status":
            assert "mine" in done.stdout and "theirs: cannot be read" in done.stdout
    (tmp_path / "theirs").chmod(0o700)
