"""What others could plant or slip in does nothing: docs/security.md names each of these attacks."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollcall.config import ConfigError, parse
from rollcall.run_dir import RunDir

ROOT = Path(__file__).parents[2]
SUBMIT = str(ROOT / "launch" / "submit.py")
NAMES = ["a b", "it's", 'a"b', "a\nb", "a\n", "$(touch pwned)", "`touch pwned`", "-rf", "--wrap=x"]
NAMES += ["..", "../x", "/tmp/x", ".hidden", "a/b", "a;b", "a%j", "x" * 101]
NOBODY = 65534
PICKLES = {ROOT / "train/data/workers.py", ROOT / "train/weights/stored.py"}
"""One pickles between a rank and the processes that it has forked itself. The other reads torch's
distributed checkpoints with an unpickler that makes nothing but their records."""


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_more_than_a_name_is_refused(name: str, tmp_path: Path) -> None:
    command = [sys.executable, SUBMIT, "--local", f"--name={name}"]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "run.name: expected letters, digits" in refused.stderr
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


def test_our_code_never_unpickles() -> None:
    """Neither files nor what peers send: a pickle runs what its writer wants."""
    for package in ("train", "launch", "rollcall", "env"):
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
