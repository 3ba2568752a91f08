"""Submission over ssh: a program in the place of ssh runs the commands in another home."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

from rollcall.records.code import CodeRecord
from rollcall.records.run_dir import RunDir

ROLLCALL = [sys.executable, str(ROOT / "env" / "bin" / "rollcall")]
SSH = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 != -G ]] || exit 0; [[ $1 != -o ]] || shift; shift; done
[[ $1 == login.cluster ]] || { echo "ssh: Could not resolve hostname $1" >&2; exit 255; }
shift
cd "$THERE" && HOME=$THERE exec bash -c "$*"
"""
SCRIPT = """
import os, sys, helper, vendored.submodule
print("on", helper.NAME, sys.argv[1:], os.path.exists("secret.key"), flush=True)
"""


@pytest.mark.long
def test_the_code_runs_on_the_other_machine_and_is_followed_from_here(
    tmp_path: Path, bare: str
) -> None:
    tools, there, project = (tmp_path / name for name in ("bin", "there", "project"))
    for folder in (tools, there, project / "sub" / "vendored"):
        folder.mkdir(parents=True)
    (tools / "ssh").write_text(SSH)
    (tools / "ssh").chmod(0o755)
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "THERE": str(there)}
    env["ROLLCALL_HOST_COMMAND"] = " ".join(ROLLCALL)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=project / "sub", env=env, capture_output=True, text=True)

    def submit(name: str, word: str, *options: str) -> tuple[RunDir, str]:
        words = ["submit", "--local", "--wait", "--nproc-per-node=1", f"--name={name}", bare]
        done = run(*ROLLCALL, *words, *options, "--host=login.cluster", "--", "fit.py", word)
        [place] = there.glob(".rollcall/project-*")
        return RunDir(place / "sub" / "runs", name), done.stdout + done.stderr

    files = {"sub/fit.py": SCRIPT, "sub/helper.py": "NAME = 1\n", "sub/gone.py": ""}
    files |= {".gitignore": "*.key\n", "sub/secret.key": "not for others"}
    files |= {"sub/vendored/submodule.py": ""}
    for name, text in files.items():
        (project / name).write_text(text)
    for folder in (project / "sub" / "vendored", project):
        git = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e"]
        for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
            subprocess.run([*git, *words], check=True)
    (project / ".git/hooks/pre-push").write_text("#!/bin/sh\nexit 1\n")
    (project / ".git/hooks/pre-push").chmod(0o755)
    before = {path for path in project.glob(".git/**/*") if path.is_file()}

    early = run(*ROLLCALL, "status", "--host=login.cluster")
    told = (
        f"--host login.cluster: {project}/sub has not been copied there yet; submit a run first\n"
    )
    assert (early.returncode, early.stderr) == (2, f"rollcall: error: {told}")
    option = run(*ROLLCALL, "status", "--host=-oProxyCommand=touch x")
    assert "--host -oProxyCommand=touch x: expected a host" in option.stderr
    first, told = submit("a", "it's *")
    assert """on 1 ["it's *"] False""" in told, told
    (project / "sub" / "helper.py").write_text("NAME = 'changed and not committed'\n")
    (project / "sub" / "gone.py").unlink()
    second, told = submit("b", "x")
    assert "on changed and not committed ['x'] False" in told, told
    assert not (second.code / "sub" / "gone.py").exists()
    assert (first.code / "sub" / "gone.py").exists()
    record = CodeRecord.read(second.job / "source.json")
    assert record is not None and record.commit and not record.modified
    assert {path for path in project.glob(".git/**/*") if path.is_file()} == before
    assert not (project / "sub" / "runs").exists()

    shown = run(*ROLLCALL, "status", "--host", "login.cluster")
    assert "a " in shown.stdout and "done" in shown.stdout, shown.stderr
    logs = run(*ROLLCALL, "logs", "a", "--host=login.cluster")
    assert "on 1" in logs.stdout, logs.stderr
    report = run(*ROLLCALL, "report", "a", "--host=login.cluster")
    assert report.stdout.startswith("report-login.cluster.html: report of 1 run, "), report.stderr
    assert "</html>" in (project / "sub" / "report-login.cluster.html").read_text()
    (project / "sub" / "report-login.cluster.html").unlink()
    assert run(*ROLLCALL, "report", "a", "-o", "b's.html", "--host=login.cluster").returncode == 0
    assert "</html>" in (project / "sub" / "b's.html").read_text()
    (project / "sub" / "b's.html").unlink()
    assert not list(there.glob(".rollcall/*/sub/*.html")), "moved"
    unwritable = run(*ROLLCALL, "report", "a", "-o", "no/b.html", "--host=login.cluster")
    assert unwritable.returncode == 2 and "no/b.html" in unwritable.stderr
    assert run(*ROLLCALL, "report", "--help", "--host=login.cluster").returncode == 0
    assert run(*ROLLCALL, "why", "nosuch", "--host=login.cluster").returncode == 2
    its_own = ["--host=login.cluster", "--host-command", "sh -c 'exit 255'"]
    assert run(*ROLLCALL, "status", *its_own).returncode == 255, "not ssh's"
    assert not list(there.glob(".rollcall/ended-*"))
    lost = run(*ROLLCALL, "status", "--host=nowhere")
    assert lost.stderr.endswith(
        "rollcall: error: --host nowhere: ssh failed; see its message above\n"
    )
    assert lost.returncode == 2
    refused = run(*ROLLCALL, "submit", "--host=nowhere", "--", "fit.py")
    assert refused.returncode == 2
    assert "--host nowhere: ssh: Could not resolve hostname nowhere" in refused.stderr
    (tools / "ssh").unlink()
    env["PATH"] = str(tools)
    alone = run(*ROLLCALL, "status", "--host=nowhere")
    assert (alone.returncode, "error: --host nowhere: ssh is not on PATH" in alone.stderr) == (
        2,
        True,
    )
