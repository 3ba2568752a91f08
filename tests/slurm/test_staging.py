"""An environment on the nodes' own disks, sent there by the job script that a profile makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from checkout import ROOT
from lab import Lab

PROFILE = """
options: {{python: {place}, time: "5"}}
setup: [{stage} job {packed} {place} || exit]
"""


def test_ranks_run_from_the_disks_of_their_nodes(lab: Lab, tmp_path: Path) -> None:
    made, packed, place = tmp_path / "made", tmp_path / "mine.tar", "/tmp/staged/mine"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    [site] = made.glob("lib/python3.*/site-packages")
    (site / "mine.py").write_text("VERSION = 7\n")
    stage = ROOT / "env" / "stage"
    subprocess.run([stage, "pack", made, packed], check=True)
    lab.output("login", str(stage), "unpack", str(packed), place)  # for submit's own checks
    project = tmp_path / "project"
    (project / "clusters").mkdir(parents=True)
    text = PROFILE.format(place=place, stage=stage, packed=packed)
    (project / "clusters" / "local.yaml").write_text(text)
    (project / "show.py").write_text("import mine, socket; print(socket.gethostname(), mine)\n")
    words = f"{ROOT}/env/run rollcall submit --cluster local --nodes 2 --wait --name one -- show.py"
    done = lab.exec("login", *words.split(), cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    for number in (0, 1):
        [*logs] = (project / "runs/one/logs/attempt-0" / f"node-{number}").glob("rank-*.log")
        assert len(logs) == 2
        for log in logs:
            assert log.read_text().startswith(f"n{number + 1} <module 'mine' from '{place}/lib")
    assert lab.output("n2", "ls", "/tmp/staged").split() == ["mine", "mine.lock", "mine.staged"]
