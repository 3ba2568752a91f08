"""A sweep of six cells on the lab: two fail, and submitting it again runs exactly those."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

from checkout import ROOT
from lab import Lab, wait_until

from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines

# In place of Slurm's 1001: two arrays are needed, each after the one before.
SCONTROL = (
    "#!/bin/sh\n[ \"$2\" = config ] && echo 'MaxArraySize = 4' && exit\nexec /usr/bin/scontrol $@\n"
)
SWEEP = """
program: ["--", fit.py, --floor, "2"]
grid: {{lr: [1, 2, 3], depth: [1, 2]}}
options: {{nproc-per-node: 1, time: 10}}
throttle: 4
"""
# It fails for the largest rate, until somebody mends what it reads. The first cells wait until the
# test has seen that the sweep is live.
SCRIPT = """
import sys, time
from pathlib import Path
while not Path({seen!r}).exists():
    time.sleep(0.1)
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if words["--lr"] == "3" and not Path({mended!r}).exists():
    raise RuntimeError("diverged")
print(sorted(words.items()))
"""


def sweep(lab: Lab, place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "launch", "sweep", *words]
    return lab.exec("login", *command, cwd=place, env=path)


def ending(cell: RunDir) -> str | None:
    verdict = cell.read_verdict()
    return verdict.state if verdict else None


def test_submitting_again_runs_the_failed_cells_only(lab: Lab, tmp_path: Path) -> None:
    mended, seen = tmp_path / "mended", tmp_path / "seen"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scontrol").write_text(SCONTROL)
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    (tmp_path / "fit.py").write_text(SCRIPT.format(mended=str(mended), seen=str(seen)))
    (tmp_path / "rates.yaml").write_text(SWEEP.format())
    place = RunDir(tmp_path / "runs", "rates")

    submitted = sweep(lab, tmp_path, "submit", "rates.yaml")
    assert submitted.returncode == 0, submitted.stderr
    assert "6 of 6 cells: lr-1_depth-1, lr-1_depth-2" in submitted.stdout
    live = sweep(lab, tmp_path, "submit", "rates.yaml")
    assert "run rates is live" in live.stderr
    seen.touch()
    jobs = [line["job"] for line in read_lines(place.job / "submissions.jsonl")]
    scripts = [(place.job / f"{job}_submission.sh").read_text() for job in jobs]
    assert [line for text in scripts for line in text.splitlines() if "--array" in line] == [
        "#SBATCH --array=0-3%4",
        "#SBATCH --array=0-1%4",
    ]
    assert f"#SBATCH --dependency=afterany:{jobs[0]}\n" in scripts[1]

    wait_until(
        lambda: lab.output("login", "squeue", "-h", "-j", ",".join(jobs)) == "",
        150,
        lambda: lab.output("login", "squeue"),
    )
    names = [path.parent.name for path in place.path.glob("*/verdict.json")]
    cells = {name: RunDir(place.path, name) for name in names}
    assert len(cells) == 6
    failed = {name: cells[name] for name in ("lr-3_depth-1", "lr-3_depth-2")}
    assert {name for name in cells if ending(cells[name]) == "failed"} == set(failed)
    told = cells["lr-2_depth-1"].log(0, 0, 0).read_text()
    assert told == "[('--depth', '1'), ('--floor', '2'), ('--lr', '2')]\n"

    mended.touch()
    again = sweep(lab, tmp_path, "submit", "rates.yaml")
    assert "2 of 6 cells: lr-3_depth-1, lr-3_depth-2\n" in again.stdout, again.stderr
    wait_until(
        lambda: {ending(cell) for cell in failed.values()} == {"done"},
        500,
        lambda: lab.output("login", "squeue"),
    )
    for name, cell in cells.items():
        assert len(list(cell.path.glob("logs/attempt-*"))) == (2 if name in failed else 1)
    shown = sweep(lab, tmp_path, "status", "rates.yaml", "--sort", "lr", "--csv", "table.csv")
    assert shown.returncode == 0, shown.stderr
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["lr"] for row in rows] == ["1", "1", "2", "2", "3", "3"]
    assert {row["state"] for row in rows} == {"done"}
    assert shown.stdout.split()[:3] == ["cell", "lr", "depth"]
    done = sweep(lab, tmp_path, "submit", "rates.yaml")
    assert "all 6 cells of rates are done" in done.stderr


def test_the_table_shows_what_training_has_reached(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "lr.yaml").write_text(
        "program: [digits, device=cpu, train.steps=4]\ngrid: {optim.lr: [1e-6, 1e-2]}\n"
        "options: {nproc-per-node: 1, time: 10}\nsort: val_accuracy\n"
    )
    submitted = sweep(lab, tmp_path, "submit", "lr.yaml")
    assert submitted.returncode == 0, submitted.stderr
    cells = [RunDir(tmp_path / "runs" / "lr", f"lr-{rate}") for rate in ("1e-2", "1e-6")]
    wait_until(
        lambda: {ending(cell) for cell in cells} == {"done"},
        500,
        lambda: lab.output("login", "squeue"),
    )
    shown = sweep(lab, tmp_path, "status", "lr.yaml", "--csv", "table.csv")
    rows = [line.split() for line in shown.stdout.splitlines()[1:]]
    evaluated = [
        next(line for line in read_lines(cell.events) if line["event"] == "evaluated")
        for cell in cells
    ]
    written = [
        [cell.name, f"{line['accuracy']:.6g}", cell.name[3:], "done", "4"]
        + [f"{value:.6g}" for value in (step.loss, line["loss"])]
        for cell, line in zip(cells, evaluated, strict=True)
        for step in cell.read_metrics()[-1:]
    ]
    assert rows == [
        [f"{float(word):.4g}" if column in (1, 5, 6) else word for column, word in enumerate(row)]
        for row in written
    ]
    assert evaluated[0]["accuracy"] > evaluated[1]["accuracy"]
    with (tmp_path / "table.csv").open() as file:
        assert [list(row.values()) for row in csv.DictReader(file)] == written
