"""A secret in the environment reaches the ranks, and no file that a run leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from checkout import ROOT

SECRET = os.urandom(16).hex()  # not a constant: the copied code would hold it
SCRIPT = """\
import os
assert os.environ["SITE_API_TOKEN"]
raise RuntimeError("as planned")
"""


def test_no_file_of_a_failed_run_holds_a_secret(tmp_path: Path, bare: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    submit = [sys.executable, str(ROOT / "launch" / "submit.py"), "--local", "--wait"]
    env = {**os.environ, "SITE_API_TOKEN": SECRET}
    command = [*submit, "--name=secret", bare, "--", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "as planned" in done.stdout, done.stdout + done.stderr
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"rank-0.log", "rank-0.failed.json", "submissions.jsonl", "script.py"} <= names
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
