"""Run directories whose files are damaged at random; see fuzz.py."""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import sys
import time
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fuzz_words import NASTY, flipped

from rollcall.launch.scheduler.job import Job
from rollcall.records.attempt import (
    AttemptEvent,
    Heartbeat,
    LogSizes,
    NodeFailure,
    NodeState,
    NoMoreRounds,
    RankFailure,
    Rendezvous,
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
)
from rollcall.records.run import JobEnd, Verdict
from rollcall.records.run_dir import RunDir
from rollcall.system.files import write_atomic

TRAINING = ["digits", "train.steps=4", "checkpoint.every=2", "log.every=1", "data.global_batch=8"]
TRAINING += ["model.name=mlp", "model.hidden_size=4", "train.evaluate_every=0.01"]
COMMANDS = [
    ["status"],
    ["status", "sweep"],
    ["why", "it"],
    ["why", "local"],
    ["compare", "it", "local"],
    ["logs", "it"],
    ["logs", "it", "--merge"],
    ["logs", "local", "--node", "0"],
    ["stacks", "it"],
    ["cancel", "it"],
    ["cancel", "local"],
    ["requeue", "it"],
    ["attach", "it", "true"],
    ["submit", "--dry-run", "--resume", "--name", "it", "digits"],
    ["submit", "--dry-run", "--name", "by-hand", "digits"],
    # More GPUs than this machine has: it reads the run, and then starts nothing.
    ["submit", "--local", "--gpus-per-node", "999", "--resume", "--name", "it", "digits"],
    ["submit", "--local", "--gpus-per-node", "999", "--name", "local", "digits"],
    ["sweep", "status", "sweep.yaml"],
    ["sweep", "submit", "--dry-run", "sweep.yaml"],
    ["checkpoint", "list", "it"],
    ["checkpoint", "verify", "it"],
    ["checkpoint", "show", "it"],
]
SLOW = [
    ["train", *TRAINING, "train.steps=5", "run.name=it"],
    ["predict", "runs/it", "--output", "predictions.jsonl"],
]
SLOW_SHARE = 0.1
"""Share of the cases that compute something, which takes a second or two."""
VALUES: list[Any] = [None, True, 0, -1, 0.5, 10**30, -(10**400), 1e308, float("nan"), float("inf")]
VALUES += [[], {}, [[]], {"a": []}, "9" * 30, "a" * 300, *NASTY[:60], "\ud800", "é", "a\0b", "../x"]


class Runs:
    """Runs as the launcher, a person and a sweep leave them, with damage of one to four files."""

    def __init__(self, template: Path) -> None:
        self._template = template
        child = os.fork()  # torch's threads must not exist here, where the cases fork
        if child == 0:
            code = 1
            try:
                make(template)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0

    def commands(self, chance: random.Random, place: Path) -> list[list[str]]:
        """Copy the runs, damage some files and give up root's rights; return some commands."""
        shutil.copytree(self._template, place, symlinks=True, dirs_exist_ok=True)
        run = chance.choice(["it", "it", "local", "by-hand", "sweep"])
        paths = sorted((place / "runs" / run).rglob("*"))
        for path in chance.sample(paths, min(len(paths), chance.randint(1, 4))):
            if path.exists() or path.is_symlink():
                damage(chance, path)
        drop_rights_of_root()
        return [chance.choice(SLOW)] if chance.random() < SLOW_SHARE else chance.sample(COMMANDS, 6)


def make(template: Path) -> None:
    """Write runs with every kind of file, as trainings and supervisors do."""
    from rollcall.train.main import main  # imports torch

    template.mkdir()
    os.chdir(template)
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        for name in ("it", "by-hand"):
            assert main([*TRAINING, f"run.name={name}"]) == 0
    Path("sweep.yaml").write_text("program: [digits]\nlist: [{seed: 1}, {seed: 2}]\n")
    for name, job in (
        ("it", "7"),
        ("local", "2147480000"),
        ("sweep", "9"),
        ("sweep/seed-1", "9_0"),
    ):
        run = RunDir("runs", name)
        _launched(run, job)
        if name != "it":
            run.record("started", world_size=2)
            run.conclude(Verdict("failed", 3, "it failed"))
    cells = [Cell("seed-1", ["seed=1"]).as_dict(), Cell("seed-2", ["seed=2"]).as_dict()]
    write_atomic(RunDir("runs", "sweep").job / Cell.file_name("1", 0), json.dumps(cells))


def _launched(run: RunDir, job: str) -> None:
    path, now = run.path, time.time()
    (run.job / "rendezvous").mkdir(parents=True)
    (run.code / "train").mkdir(parents=True)
    (run.code / "train" / "loop.py").write_text("x = 1\n")
    source = {"root": "/nowhere", "commit": "0" * 40, "modified": True}
    source |= {"shared": [".py"], "files": {"train/loop.py": "0" * 64}}
    (run.job / "source.json").write_text(json.dumps(source))
    (run.job / "source.diff").write_text("diff\n")
    (run.job / "packages.txt").write_text("torch==2\n")
    words = (sys.executable, "-m", "rollcall", "supervise", "--", "-m", "rollcall.train", "digits")
    asked = Job(run.name, 2, words, str(run.code), str(slurm_output(run.job, "%j")), 2)
    JobRecord(str(path), 2, more=asdict(asked)).write(path)
    Submission(job, now, ["digits"], "/here", {"python": "3.11"}).append(path)
    Cancellation(["1"], now).append(path)
    Restart(now, job, "crash", 2, ["n1"]).append(path)
    BatchRecord(f"{job}.0", 0, ["srun", "true"], "/dev/null").write(path)
    JobEnd(now + 100).write(path)
    for attempt, state in ((0, "failed"), (1, None)):
        started = AttemptEvent(attempt, job, "started", now, hosts=["n1", "n2"], ranks=4)
        started.append(path)
        if state:
            AttemptEvent(attempt, job, "ended", now, state=state, exit_code=1).append(path)
        for node in (0, 1):
            part = NodeState(attempt, node, f"n{node + 1}", "failed", now, 99, now, 1)
            NodeState.path_in(path, **asdict(part)).parent.mkdir(parents=True, exist_ok=True)
            part.write(path)
            logs = run.log(attempt, node, 0).parent
            logs.mkdir(parents=True, exist_ok=True)
            sizes = {}
            for rank in (2 * node, 2 * node + 1):
                run.log(attempt, node, rank).write_text("a line\nRuntimeError: it\n")
                sizes[str(rank)] = run.log(attempt, node, rank).stat().st_size
            LogSizes(now, sizes).append(logs)
        logs = run.log(attempt, 1, 0).parent
        RankFailure(now, "n2", 1, "RuntimeError: it", 2, "rank-2").write(logs)
        RankFailure(now, "n2", 137, "", 3, "agent").write(logs)
        key = f"{job}.0.{attempt}"
        Rendezvous(attempt, "n1", "10.0.0.1", 29400, 2).write(path, key=key)
        NodeFailure(1, "n2", "its ranks ended").write(path, key=key)
        Heartbeat.of_node(path, key, 0).write(b"00000001")
    NoMoreRounds("the head has ended").write(path, key=f"{job}.0.2")
    local_output(run.job, "2147480000", 0).write_text("output\n")
    slurm_output(run.job, job).write_text("output\n")


def damage(chance: random.Random, path: Path) -> None:
    """Spoil one file or directory."""
    if chance.random() < 0.1:
        _replaced(chance, path)
    elif path.is_dir():
        if chance.random() < 0.5:
            path.chmod(chance.choice((0o000, 0o400, 0o500)))
    elif path.is_file():
        if chance.random() < 0.1:
            path.chmod(0o000)
        else:
            path.chmod(0o600)
            data = path.read_bytes()
            path.write_bytes(chance.choice((_other_bytes, _other_json))(chance, data))


def _replaced(chance: random.Random, path: Path) -> None:
    """Put something of another type in the place of a file or directory, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    kind = chance.randrange(6)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to(path)
    elif kind == 2:
        path.symlink_to("/nowhere/at/all")
    elif kind == 3:
        path.symlink_to(path.parent)
    elif kind == 4:
        path.write_bytes(b"")


def _other_bytes(chance: random.Random, data: bytes) -> bytes:
    kind, place = chance.randrange(7), chance.randrange(len(data) + 1)
    length = chance.choice((1, 8, 777))
    if kind <= 1:
        return flipped(chance, data)
    if kind == 2:
        return data[:place]
    if kind == 3:
        return data[:place] + bytes(length) + data[place + length :]
    if kind == 4:
        return data[:place] + chance.randbytes(length) + data[place + length :]
    if kind == 5:
        return chance.choice(NASTY).encode(errors="surrogateescape")
    return data + data[place:]


def _other_json(chance: random.Random, data: bytes) -> bytes:
    """Return other values, or other keys, in one JSON object of a file."""
    lines = data.split(b"\n")
    number = chance.randrange(len(lines))
    try:
        found = json.loads(data)
        lines, number = [data], 0
    except (ValueError, RecursionError):
        try:
            found = json.loads(lines[number])
        except (ValueError, RecursionError):
            return _other_bytes(chance, data)
    lines[number] = json.dumps(_other_value(chance, found)).encode()
    return b"\n".join(lines) + b"\n"


def _other_value(chance: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice(list(value))
        if chance.random() < 0.2:
            return {name: item for name, item in value.items() if name != key}
        if chance.random() < 0.1:
            return {chance.choice(NASTY): value[key], **value}
        return {**value, key: _other_value(chance, value[key])}
    if isinstance(value, list) and value and chance.random() < 0.5:
        place = chance.randrange(len(value))
        return [*value[:place], _other_value(chance, value[place]), *value[place + 1 :]]
    return chance.choice(VALUES)


def drop_rights_of_root() -> None:
    """Make the modes of files count for root too, by giving up all capabilities (capset(2))."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)())
