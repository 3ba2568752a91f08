"""The table of commands: its help, and how to add one."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from checkout import ROOT

from rollcall.cli import program as cli
from rollcall.cli.commands import COMMANDS

TYPED = [name for name, command in COMMANDS.items() if command.by_people]
NEW = '''
"""`rollcall weather RUN`: a command that somebody has added."""

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Print the words; return the exit code."""
    print("sunny in", *argv)
    return 3
'''


@pytest.mark.parametrize("start", [["-m", "rollcall"], ["-m", "launch"], ["env/bin/rollcall"]])
def test_every_way_to_start_shows_the_same_commands(start: list[str]) -> None:
    shown = subprocess.run(
        [sys.executable, *start, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown.stdout == cli.usage() + "\n"
    for name in TYPED:
        assert f"  {name} " in shown.stdout


@pytest.mark.parametrize("name", TYPED)
def test_every_command_has_help_under_its_name(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = importlib.import_module(f"rollcall.{COMMANDS[name].module}").main(["--help"])
    except SystemExit as left:
        code = left.code
    assert code in (0, None)
    shown = capsys.readouterr().out
    assert f"rollcall {name}" in shown
    assert shown.partition("\n")[0].startswith("usage: rollcall watch ") == (name == "watch")
    assert "__main__.py" not in shown


def test_a_command_without_output_or_input_works(tmp_path: Path) -> None:
    line = f"{sys.executable} env/bin/rollcall status --root {tmp_path} <&- >&-"
    shown = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, "")


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("sumbit", ", did you mean 'submit'?"),
        ("resume", "; a run resumes if you repeat its command with run.name=RUN"),
        ("ps", "; use status"),
        ("xyzzy", "; `rollcall --help` lists the commands"),
    ],
)
def test_an_unknown_command_is_refused_with_the_nearest(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([word]) == 2
    said = capsys.readouterr().err
    assert f"unknown command '{word}'{hint}" in said and said.count("\n") == 1


@pytest.mark.parametrize("word", ["--version", "version"])
def test_the_version_is_the_projects(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert cli.main([word]) == 0
    assert capsys.readouterr().out == f"rollcall {project['version']}, in {ROOT}\n"


def test_a_new_launcher_command_is_one_file_and_one_line(tmp_path: Path) -> None:
    for name in ("rollcall", "launch", "train"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    (tmp_path / "rollcall" / "launch" / "commands" / "weather.py").write_text(NEW)
    with (tmp_path / "rollcall" / "cli" / "commands.md").open("a") as table:
        table.write("| weather | runs | launch.commands.weather | show the weather |\n")
    for start in ("rollcall", "launch"):
        done = subprocess.run(
            [sys.executable, "-m", start, "weather", "a"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (3, "sunny in a\n"), done.stderr
    shown = subprocess.run(
        [sys.executable, "-m", "rollcall", "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert "weather" in shown.stdout and "show the weather" in shown.stdout


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words",
    [
        ["-m", "train", "--help", "all"],
        ["-m", "rollcall", "explain"],
        ["-m", "rollcall", "--help"],
        ["launch/submit.py", "--dry-run"],
        ["launch/submit.py", "--help"],
    ],
    ids=" ".join,
)
def test_a_pipe_that_nobody_reads_is_no_traceback(words: list[str], unbuffered: str) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=env, stdout=theirs, stderr=subprocess.PIPE
    )
    os.close(theirs)
    assert b"Traceback" not in ended.stderr and b"BrokenPipe" not in ended.stderr
    assert ended.returncode in (0, 128 + signal.SIGPIPE)


def test_an_option_whose_value_is_two_dashes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["submit", "--nodes=--"], ["submit", "-N--"], ["status", "--root=--"]):
        try:
            code = cli.main(words)
        except SystemExit as end:  # of argparse
            code = int(end.code or 0)
        assert code == 2
        assert "expected a value" in capsys.readouterr().err
