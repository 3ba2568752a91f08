"""Planted files and words do nothing: docs/security.md names each of these attacks."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

from rollcall.config import ConfigError, parse
from rollcall.launch.sweep import definition
from rollcall.messages.refusal import RefusedError
from rollcall.records.run import Verdict
from rollcall.records.run_dir import RunDir

SUBMIT = str(ROOT / "launch" / "submit.py")
NAMES = ["a b", "it's", 'a"b', "a\nb", "a\n", "$(touch pwned)", "`touch pwned`", "-rf", "--wrap=x"]
NAMES += ["..", "../x", "/tmp/x", ".hidden", "a/b", "a;b", "a%j", "x" * 101]
NOBODY = 65534
PICKLES = {ROOT / "rollcall/train/data/workers.py", ROOT / "rollcall/train/weights/stored.py"}
PICKLES |= {ROOT / "rollcall/launch/api/call.py"}
"""One pickles between a rank and the processes that it has forked itself. One names the error with
which torch refuses a pickle. One has the function that a program submits, and its result: only the
ranks, and that program, import it."""


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_more_than_a_name_is_refused(name: str, tmp_path: Path) -> None:
    command = [sys.executable, SUBMIT, "--local", f"--name={name}"]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "--name: expected letters, digits" in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_runs_no_code(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    mark = tmp_path / "pwned"
    recipe.write_text(f'model: {{name: !!python/object/apply:os.system ["touch {mark}"]}}')
    with pytest.raises(ConfigError, match="not valid YAML"):
        parse([str(recipe)])
    with pytest.raises(ConfigError, match="not valid YAML"):
        parse([f"model.name=!!python/object/apply:os.system ['touch {mark}']"])
    assert not mark.exists()


def test_a_recipe_of_nested_aliases_is_refused_at_once(tmp_path: Path) -> None:
    """Nine lines that would be 12**8 words if they were written out."""
    keys = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "dropout")
    lines = ["model:", f"  name: &name [{', '.join(['lol'] * 12)}]"]
    for before, key in zip(("name", *keys), keys, strict=False):
        lines.append(f"  {key}: &{key} [{', '.join([f'*{before}'] * 12)}]")
    lines += ["optim:", f"  name: &x [{', '.join(['*dropout'] * 12)}]"]
    lines.append(f"  lr: [{', '.join(['*x'] * 12)}]")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="optim") as error:
        parse([str(recipe)])
    assert len(str(error.value)) < 20_000
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("\n".join([*lines[:-2], f"grid: [{', '.join(['*dropout'] * 12)}]"]))
    with pytest.raises(RefusedError, match="grid") as refused:
        definition.read(sweep)
    assert len(str(refused.value)) < 20_000


def test_a_run_directory_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run = RunDir(tmp_path / "runs", "mine")
        run.create()
    finally:
        os.umask(before)
    assert run.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away: run it as root")
def test_a_run_directory_that_another_user_has_planted_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (tmp_path / "link").symlink_to(mine)
    os.chown(tmp_path / "link", NOBODY, NOBODY, follow_symlinks=False)
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", NOBODY, NOBODY)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name in ("link", "theirs", "open"):
        with pytest.raises(PermissionError, match="belongs to another user, or everybody"):
            RunDir(tmp_path, name).create()
    assert list(mine.iterdir()) == []


ATTACK = "\x1b]0;title\x07\x1b[2J\x9b31mdone\rnothing failed\u202e"
"""Sets the title of a terminal, clears it, and writes over the line."""


def test_a_record_controls_no_terminal(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs", "theirs")
    run.create()
    run.config.write_text(f"model: {{name: {json.dumps(ATTACK)}}}\n")
    run.record("started", world_size=1, launcher="alone", chip="cpu")
    run.conclude(Verdict("failed", 1, ATTACK))
    log = run.log(0, 0, 0)
    log.parent.mkdir(parents=True)
    log.write_text(f"{ATTACK}\n\x1b[31mred\x1b[0m\n")
    (tmp_path / "runs" / f"evil{ATTACK}" / "job").mkdir(parents=True)
    for words in (["why", "theirs"], ["status"], ["logs", "theirs"], ["compare", "theirs", "x"]):
        output = _on_a_terminal([sys.executable, "-m", "rollcall", *words], tmp_path)
        assert output, words
        controls = set(re.findall(r"\x1b\[[0-9;]*m|[\x00-\x1f\x7f-\x9f\u202e]", output))
        assert controls <= {"\r", "\n", "\x1b[31m", "\x1b[0m"}, words
        assert "\r" not in output.replace("\r\n", "")


def _on_a_terminal(command: list[str], directory: Path) -> str:
    """Return what a command writes to its terminal, which ends lines with \\r\\n."""
    terminal, other = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    process = subprocess.Popen(
        command, cwd=directory, stdin=other, stdout=other, stderr=other, env=environment
    )
    os.close(other)
    output = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while block := os.read(terminal, 1 << 16):
            output += block
    os.close(terminal)
    process.wait(500)
    return output.decode()


def test_an_option_of_srun_adds_no_line_to_the_script(tmp_path: Path) -> None:
    words = ["--dry-run", "--srun-arg=--x\n#SBATCH --uid=0", "digits"]
    refused = subprocess.run(
        [sys.executable, SUBMIT, *words], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert refused.returncode == 2
    assert "contains a control character" in refused.stderr


def test_a_refused_pickle_comes_without_advice_to_run_it(tmp_path: Path) -> None:
    import torch

    from rollcall.train.weights.stored import open_

    torch.save({"weight": Path}, tmp_path / "theirs.pt")
    with pytest.raises(
        ConfigError, match=r"pickle of more than tensors, with pathlib\.Path"
    ) as error:
        open_(str(tmp_path / "theirs.pt"))
    assert "weights_only" not in str(error.value)


def test_compiled_code_lies_in_the_users_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollcall.train.main import on_all_ranks

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "x")  # so that it is put back
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert on_all_ranks("abacus", lambda *_: 0) == 2
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/torchinductor"


def test_our_code_never_unpickles() -> None:
    """Neither files nor what peers send: a pickle runs what its writer wants."""
    for package in ("rollcall", "env"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                place = f"{file}:{getattr(node, 'lineno', 0)}"
                if isinstance(node, ast.Import | ast.ImportFrom) and file not in PICKLES:
                    modules = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                    assert not modules & {"pickle", "cloudpickle", "shelve", "marshal"}, place
                if isinstance(node, ast.Call):
                    called, words = ast.unparse(node.func), ast.unparse(node)
                    assert not called.endswith(("gather_object", "_object_list")), place
                    assert called != "torch.load" or "weights_only=True" in words, place
                    assert called != "yaml.load" or words.endswith(
                        ("SafeLoader)", "BaseLoader)")
                    ), place


def test_no_command_imports_what_unpickles_functions() -> None:
    for file in (ROOT / "rollcall").rglob("*.py"):
        if file.parent.name != "api" and file != ROOT / "rollcall/__init__.py":
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    assert "launch.api" not in ast.unparse(node), file
