"""The loggers of TensorBoard, W&B and MLflow: a run that starts again is one, each step once."""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import Ranks, logged_steps

from rollcall.records.run import LoggedStep
from rollcall.records.run_dir import RunDir
from rollcall.train.loggers import Once

Points = list[tuple[int, float]]
BLOCK = 2**15
"""Bytes of a block of W&B's files, which are in the log format of LevelDB."""


def tensorboard(path: Path) -> Points:
    module = "tensorboard.backend.event_processing.event_accumulator"
    reader = importlib.import_module(module).EventAccumulator(str(path / "tensorboard"))
    reader.Reload()
    return [(point.step, point.value) for point in reader.Scalars("training/loss")]


def wandb(path: Path) -> Points:
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    found: Points = []
    names: set[str] = set()
    for file in sorted(path.glob("wandb/offline-run-*/*.wandb")):
        for content in _records(file.read_bytes()):
            one = record.FromString(content)
            names.update([one.run.run_id] if one.HasField("run") else [])
            items = {item.key or item.nested_key[0]: item.value_json for item in one.history.item}
            if "loss" in items:
                found.append((int(items["_step"]), float(items["loss"])))
    assert len(names) == 1, "it continues under one name"
    return found


def mlflow(path: Path) -> Points:
    client = importlib.import_module("mlflow.tracking").MlflowClient(f"sqlite:///{path}/mlflow.db")
    [run] = client.search_runs([one.experiment_id for one in client.search_experiments()])
    points = client.get_metric_history(run.info.run_id, "loss")
    return [(point.step, point.value) for point in points]


def _records(data: bytes) -> Iterator[bytes]:
    at, content = 7, b""  # behind the header of the file
    while at + 7 <= len(data):
        _, length, kind = struct.unpack_from("<IHB", data, at)
        content += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its end
            yield content
            content = b""
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK


@pytest.mark.parametrize(
    ("read", "by"),
    [(tensorboard, "SIGKILL"), (mlflow, "SIGKILL"), (wandb, "SIGTERM")],
    ids=["tensorboard", "mlflow", "wandb"],
)
def test_a_run_that_starts_again_is_one(
    read: Callable[[Path], Points], by: str, tmp_path: Path
) -> None:
    pytest.importorskip(read.__name__, reason=f"{read.__name__} is not installed")
    words = ["digits", "device=cpu", "model.name=mlp", "train.steps=8", "log.every=1"]
    words += [f"run.root={tmp_path}", "run.name=run", "train.epochs=1"]
    words += [f"log.to={read.__name__}", "train.callbacks=user_tasks:Killed"]
    # Killed after step 7 and, from the checkpoint of step 4, after step 5: 6 and 7 come again.
    steps = ["7", "5"] if by == "SIGKILL" else ["5"]
    words += [f"train.callbacks.Killed.args.by={by}", "checkpoint.every=4"]
    words += [f"train.callbacks.Killed.args.steps={'+'.join([*steps, '-1', '-1'])}"]
    place = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "1"}
    for attempt in steps:
        ended = Ranks(1, words, tmp_path / f"logs-{attempt}", place)
        assert ended.wait() == [-9 if by == "SIGKILL" else 75], ended.output()
    again = Ranks(1, words, tmp_path / "logs-again", place)
    assert again.wait() == [0], again.output()
    if by == "SIGKILL":  # a finished run only evaluates once more
        finished = Ranks(1, words, tmp_path / "logs-finished", place)
        assert finished.wait() == [0], finished.output()
    expected = [(line["step"], line["loss"]) for line in logged_steps(RunDir(tmp_path, "run"))]
    assert [step for step, _ in expected] == [*range(1, 9)]
    found = read(tmp_path / "run")
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-6)


def test_a_run_killed_twice_after_one_checkpoint_logs_no_step_twice(tmp_path: Path) -> None:
    """The attempts train the steps 1 to 7, 5 and 5 to 8, and leave out what earlier ones logged."""
    run: Any = SimpleNamespace(run_dir=RunDir(tmp_path, "run"))
    path = run.run_dir.path
    path.mkdir()
    found: list[int] = []
    for first, last in ((1, 7), (5, 5), (5, 8)):
        once = Once(run)
        LoggedStep.forget_after(path, first - 1)  # as the trainer does before its first line
        with run.run_dir.metrics.open("a") as file:
            for step in range(first, last + 1):
                found += [step for _ in once.new(step, {"loss": 0.5})]
                line = {"step": step, "loss": 0.5, "time": 0.0, "samples_per_second": 1.0}
                file.write(json.dumps(line) + "\n")
    assert found == [*range(1, 9)]
