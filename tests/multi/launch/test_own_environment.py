"""A user's project in a separate environment, with modules in editable mode and elsewhere."""

import os
import subprocess
import sys
import time
from pathlib import Path

from checkout import ROOT

from rollcall.records.code import CodeRecord
from rollcall.records.run_dir import RunDir

SUBMIT = [sys.executable, str(ROOT / "launch" / "submit.py")]
SCRIPT = """
import os, pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
import beside, helpers.tools, mypkg.model, other, random, subprocess
print(mypkg.model.VERSION, helpers.tools.VERSION, beside.VERSION, other.VERSION)
print(sys.executable, sys.prefix, random.__file__, other.__file__, flush=True)
time.sleep(2 * int(os.environ["RANK"]))  # the run ends with the last node, not with the first
child = "import mypkg.model, helpers.tools; print(mypkg.model.VERSION, helpers.tools.VERSION)"
subprocess.run([sys.executable, "-c", child], check=True)
"""


def environment(place: Path, *editable: Path) -> Path:
    """Make a virtual environment with nothing in it but these directories in editable mode."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    [site] = place.glob("lib/python3.*/site-packages")
    (site / "__editable__.mypkg.pth").write_text("".join(f"{path}\n" for path in editable))
    return place


def write(versions: dict[Path, str]) -> None:
    for path, version in versions.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"VERSION = {version!r}\n")


def test_what_was_submitted_runs_in_an_environment_without_rollcalls_packages(
    tmp_path: Path,
) -> None:
    project, elsewhere, go = tmp_path / "project", tmp_path / "lib", tmp_path / "go"
    files = [
        project / "src" / "mypkg" / "model.py",
        elsewhere / "helpers" / "tools.py",
        project / "scripts" / "beside.py",
        project / "plain" / "other.py",
    ]
    write(dict.fromkeys(files, "submitted"))
    write(
        {project / "src" / "mypkg" / "__init__.py": "", project / "src" / "random.py": "not this"}
    )
    (project / "scripts" / "fit.py").write_text(SCRIPT)
    for repository in (project, elsewhere):
        git = ["git", "-C", str(repository), "-c", "user.name=n", "-c", "user.email=e"]
        for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
            subprocess.run([*git, *words], check=True)
    (elsewhere / "helpers" / "__init__.py").touch()
    files[1].write_text("VERSION = 'uncommitted'\n")
    python = environment(tmp_path / "venv", project / "src", project / "plain")

    env = os.environ | {"PYTHONPATH": str(elsewhere)}
    words = ["--local", "--nodes=2", "--nproc-per-node=1", "--name=a", f"--python={python}"]
    done = subprocess.run(
        [*SUBMIT, *words, "--", "scripts/fit.py", str(go)],
        cwd=project, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    write(dict.fromkeys(files, "edited after the submission"))
    go.touch()

    run = RunDir(project / "runs", "a")
    end = time.monotonic() + 500
    while (verdict := run.read_verdict()) is None and time.monotonic() < end:
        time.sleep(0.1)
    assert verdict is not None and verdict.state == "done", verdict
    for node in (0, 1):
        said = run.log(0, node, node).read_text().split()
        assert said[:4] == ["submitted", "uncommitted", "submitted", "submitted"]
        assert said[4:6] == [str(python / "bin" / "python"), str(python)]
        assert "/lib/python3" in said[6], "src/random.py must not hide the standard library's"
        assert said[7] == str(run.code / "plain" / "other.py")
        assert said[8:] == ["submitted", "uncommitted"]
    records = {path: CodeRecord.read(path) for path in (run.job / "modules").glob("*.json")}
    [(path, record)] = [it for it in records.items() if it[1] and it[1].root == str(elsewhere)]
    assert record is not None and record.modified and record.commit
    assert "+VERSION = 'uncommitted'" in path.with_suffix(".diff").read_text()
    assert sorted(record.files) == ["helpers/__init__.py", "helpers/tools.py"]
    status = subprocess.run(
        ["git", "status", "--short"], cwd=project, capture_output=True, text=True, check=True
    )
    assert "runs" not in status.stdout
