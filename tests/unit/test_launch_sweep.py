"""A sweep's file: its cells, their names, and how a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import cells
from train.config import parse


def write(folder: Path, text: str) -> Path:
    (folder / "lr.yaml").write_text(text)
    return folder / "lr.yaml"


def test_names_depend_on_the_cells_own_values_and_are_names_of_runs(tmp_path: Path) -> None:
    grid = "grid: {optim.lr: [1e-3, 3e-4], data.name: ['a b:c'], seed: [0, 1]}"
    first = cells.read(write(tmp_path, grid))
    assert len(first.cells) == 4
    again = cells.read(write(tmp_path, "list: [{optim.lr: 3e-4, data.name: 'a b:c', seed: 1}]"))
    assert again.cells[0] == first.cells[3]
    assert again.cells[0].name.startswith("lr-3e-4_name-a-b-c_seed-1_")
    longer = cells.read(write(tmp_path, f"list: [{{seed: {'1' * 200}}}, {{a.x: 1, b.x: 1}}]"))
    for cell in [*first.cells, *longer.cells]:
        assert parse([f"run.name={cell.name}"])[1].run.name == cell.name
    assert first.cells[0].words(True)[0] == "optim.lr=1e-3"
    assert cells.Cell("a", {"lr": "1", "x": "2"}).words(False) == ["--lr", "1", "--x", "2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gird: {a: [1]}", "lr.yaml: unknown key 'gird', did you mean 'grid'?"),
        ("grid: {a: 1}", "lr.yaml: grid: expected a list of values for each key"),
        ("program: [digits]", "lr.yaml: there are no cells: add grid or list"),
        ("list: [{a: 1}, {a: 1}]", "lr.yaml: the cell a-1 stands there twice"),
        ("list: [{a: [1, 2]}]", "lr.yaml: a: expected a single value"),
        ("{list: [{a: 1}], throttle: few}", "lr.yaml: throttle: a whole number from 1 on"),
        ("program: digits", "lr.yaml: program: expected a list of words, found 'digits'"),
    ],
)
def test_a_wrong_file_is_told_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(cells.SweepError, match=message.replace("?", r"\?")):
        cells.read(write(tmp_path, text))
