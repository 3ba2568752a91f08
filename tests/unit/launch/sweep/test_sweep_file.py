"""A sweep's file: its cells, their names, and the messages for a wrong one."""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import submitit

from rollcall.cli import program as cli
from rollcall.config import parse
from rollcall.launch.scheduler.job import array_tasks
from rollcall.launch.submission import executors
from rollcall.launch.sweep import definition, local, sweep
from rollcall.messages.refusal import RefusedError
from rollcall.records.job import Cell
from rollcall.records.run import LoggedStep, Validation, Verdict
from rollcall.records.run_dir import RunDir


def write(folder: Path, text: str) -> Path:
    (folder / "lr.yaml").write_text(text)
    return folder / "lr.yaml"


def test_names_depend_on_the_cells_own_values_and_are_names_of_runs(tmp_path: Path) -> None:
    grid = "grid: {optim.lr: [1e-3, 3e-4], data.name: ['a b:c'], seed: [0, 1]}"
    first = definition.read(write(tmp_path, grid))
    assert len(first.cells) == 4
    again = definition.read(
        write(tmp_path, "list: [{optim.lr: 3e-4, data.name: 'a b:c', seed: 1}]")
    )
    assert again.cells[0] == first.cells[3]
    assert again.cells[0].name.startswith("lr-3e-4_name-a-b-c_seed-1_")
    odd = f"list: [{{seed: {'1' * 200}}}, {{a.x: 1, b.x: 1}}, {{}}, {{ü: ß}}]"
    longer = definition.read(write(tmp_path, odd))
    for cell in [*first.cells, *longer.cells]:
        assert parse([f"run.name={cell.name}"])[1].run.name == cell.name
    assert first.cells[0].words(True)[0] == "optim.lr=1e-3"
    cell = definition.SweepCell("a", {"lr": "1", "x": "2"})
    assert cell.words(False) == ["--lr", "1", "--x", "2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gird: {a: [1]}", "lr.yaml: unknown key 'gird', did you mean 'grid'?"),
        ("grid: {a: 1}", "lr.yaml: grid: expected a list of values for each key, such as"),
        ("program: [digits]", "lr.yaml: the sweep has no cells: add grid or list"),
        ("list: [{a: 1}, {a: 1}]", "lr.yaml: the cell a-1 is listed twice"),
        ("list: [{a: [1, 2]}]", "lr.yaml: a: expected a single value"),
        (
            "{list: [{a: 1}], throttle: few}",
            "lr.yaml: throttle: expected a whole number from 1",
        ),
        ("{list: [{a: 1}], throttle: [1]}", "lr.yaml: throttle: expected a single value"),
        ("{list: [{a: 1}], sort: [a]}", "lr.yaml: sort: expected a single value"),
        ("program: digits", "lr.yaml: program: expected a list of words, found 'digits'"),
    ],
)
def test_a_wrong_file_is_told_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RefusedError, match=message.replace("?", r"\?")):
        definition.read(write(tmp_path, text))


def test_loss_is_the_training_loss_and_val_loss_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, "grid: {optim.lr: [1, 3, 2]}")
    for cell, validation in (("lr-1", 0.9), ("lr-3", math.nan), ("lr-2", 0.3)):
        run = RunDir(tmp_path / "runs" / "lr", cell)
        run.path.mkdir(parents=True)
        LoggedStep(1, 5.0, 1.0, 0.0).append(run.path)
        LoggedStep(2, 0.5, 1.0, 0.0).append(run.path)
        Validation(2, validation, 0.0, 0.75).append(run.path)
        LoggedStep(3, 0.25, 1.0, 0.0).append(run.path)
    Verdict("done", 8, "8 steps trained").write(run.path)  # not every step is logged
    assert sweep.main(["status", str(path)]) == 0
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head == ["cell", "val_loss", "optim.lr", "state", "step", "loss", "val_accuracy"]
    assert rows == [
        ["lr-2", "0.3", "2", "done", "8", "0.25", "0.75"],
        ["lr-1", "0.9", "1", "running", "3", "0.25", "0.75"],
        ["lr-3", "nan", "3", "running", "3", "0.25", "0.75"],
    ]
    assert cli.main(["sweep", "status", str(path), "--sort", "accuracy"]) == 2
    assert "did you mean 'val_accuracy'?" in capsys.readouterr().err


def test_a_task_that_starts_while_the_array_is_asked_to_stop_stops_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Start(executors.Local):
        def start(self, *words: Any) -> submitit.Job[None]:
            job = super().start(*words)
            array._stop()
            return job

    monkeypatch.setattr(local, "Local", Start)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "")  # restored at the end
    command = ["--", "sh", "-c", f"sleep 2; touch {tmp_path}/went-on"]
    given = {"run_dir": tmp_path / "a", "cells": None, "command": command}
    array = local.Array(argparse.Namespace(**given, nodes=1, minutes=None), [], [])
    array._start(0, local.divide(1, 1, 0, 1)[0])
    while not array._running[0].job.done():
        time.sleep(0.05)
    assert not (tmp_path / "went-on").exists()


def test_every_task_of_a_local_array_has_a_gpu_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert [share.gpus for share in local.divide(None, 1, 0, 16)] == [["0"], ["1"]]
    four = local.divide(4, 1, 0, 16)
    assert [share.gpus for share in four] == [["0"], ["0"], ["1"], ["1"]]
    assert [share.cpus for share in four] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [share.cpus for share in local.divide(None, 4, 0, 16)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_arrays_are_read_as_sbatch_reads_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert array_tasks("0-3%2") == ([0, 1, 2, 3], 2)
    assert array_tasks("1,3,10-20:5") == ([1, 3, 10, 15, 20], None)
    for wrong in ("", "a", "1-", "3-0", "0:0", "0-3%0", "0-3%00", "0-9:0", "0-9:00", "0-3%"):
        with pytest.raises(RefusedError, match="expected indices such as"):
            array_tasks(wrong)
    assert cli.main(["array", "--run-dir=a", "--tasks=0-x", "--", "true"]) == 2
    assert "--array 0-x: expected indices such as" in capsys.readouterr().err


def test_the_cells_of_a_recipe_of_ones_own_are_checked_before_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("train: {steps: 2}\n")
    grid = "program: [./mine.yaml]\ngrid: {optim.lr: [%s]}"
    write(tmp_path, grid % "1e-3, 1e-2")
    assert cli.main(["sweep", "submit", "--local", "--dry-run", "lr.yaml"]) == 0
    assert "2 of 2 cells: lr-1e-3, lr-1e-2" in capsys.readouterr().out
    write(tmp_path, grid % "fast")
    assert cli.main(["sweep", "submit", "--local", "--dry-run", "lr.yaml"]) == 2
    assert "optim.lr: expected a number such as 0.001, got 'fast'" in capsys.readouterr().err


def test_a_relative_path_of_a_cell_is_found_by_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks work in a copy of the code, which has no weights."""
    monkeypatch.chdir(tmp_path)
    for name in ("one.pt", "two.pt", "words.txt"):
        Path(name).write_text("a cat")
    Path("start.yaml").write_text(
        "program: [gpt, data.name=text, model.init=one.pt, data.path=words.txt]\n"
        "grid: {model.init: [one.pt, two.pt], seed: [1]}\n"
    )
    read = definition.read(Path("start.yaml"))
    planned = sweep._plan(read, "runs", read.cells, [], local=True)
    (text,) = planned.files.values()
    (tmp_path / "cells.json").write_text(str(text))
    words = [cell.words[-1] for cell in Cell.all_of(tmp_path / "cells.json")]
    assert words == [f"model.init={tmp_path}/{name}.pt" for name in ("one", "two")]
