"""Code that a file names: nothing runs that its reader has not written, typed or trusted."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

from rollcall.config import ConfigError, arguments, parse, trust
from rollcall.messages.refusal import RefusedError

NOBODY = 65534
NET = """
from subprocess import Popen
from psutil import Popen as Other
from torch import load, nn

class Net(nn.Sequential):
    pass

class NoModel:
    def __init__(self, file):
        open(file, "w").close()
"""
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a module of the user's, and no trusted package."""
    (tmp_path / "my_code_of_trust.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "stdin", None)
    return tmp_path


def recipe(name: str) -> str:
    Path("recipe.yaml").write_text(f'model: {{name: "{name}"}}\n')
    return "recipe.yaml"


@pytest.mark.parametrize(
    "name",
    [
        *("subprocess:Popen", "os:system", "builtins:exec", "importlib:import_module"),
        *("runpy:run_path", "posix:system", "torch.hub:load", "torch.utils.collect_env:run"),
        *("torch.utils.cpp_extension:load_inline", "psutil:Popen", "pip:main", "antigravity:x"),
        *("rollcall.system.process:run", "numpy.f2py:compile", "__main__:x"),
        *("torch.ops:load_library", "torch.classes:load_library"),
    ],
)
def test_no_configuration_names_modules_that_run_commands(name: str) -> None:
    texts = {word: [word] for word in (f"model.name={name}", f"train.loss={name}")}
    texts |= {f"train.callbacks={{'{name}': {{}}}}": [f"train.callbacks={{'{name}': {{}}}}"]}
    texts |= {"a group": ["optim.groups={'*': {optimizer: " + f"'{name}'" + "}}"]}
    texts |= {"a recipe": [recipe(name)], "a recipe that trusts": [recipe(name), "run.trust=x"]}
    for words in texts.values():
        with pytest.raises(ConfigError, match="is not for models, data or training"):
            parse(words)


@pytest.mark.parametrize("attribute", ["Popen", "Other", "load", "NoModel"])
def test_code_from_elsewhere_is_refused_before_it_is_called(attribute: str, project: Path) -> None:
    mark = project / "pwned"
    args = {"Popen": {"args": ["touch", str(mark)]}, "Other": {"args": ["touch", str(mark)]}}
    values = args.get(attribute, {"file": str(mark)} if attribute == "NoModel" else {"f": "x"})
    with pytest.raises(ConfigError, match=r"is not for models|derived from torch's Module"):
        name = f"my_code_of_trust:{attribute}"
        arguments.call("model.name", "model.args", name, values, config=None, source=None)
    assert not mark.exists()


def test_a_file_names_own_and_harmless_code_but_asks_for_other_packages() -> None:
    for name in ("my_code_of_trust:Net", "torch.nn:Flatten", "torchvision.models:resnet18"):
        assert parse([recipe(name)])[1].run.trust is None
    for words in (["model.name=yaml:Loader"], [recipe("my_code_of_trust:Net")]):
        parse(words)
    for file in ("yaml:Dumper", "pydantic:create_model", "rollcall.train.models.cnn:cnn"):
        with pytest.raises(ConfigError, match="may run any code as you"):
            parse([recipe(file)])
    assert parse([recipe("yaml:Dumper"), "run.trust=yaml"])[1].run.trust == "yaml"
    Path("recipe.yaml").write_text('model: {name: "yaml:Dumper"}\nrun: {trust: yaml}')
    with pytest.raises(ConfigError, match="may run any code as you"):
        parse(["recipe.yaml"])


def test_a_name_that_was_typed_once_may_stand_in_the_file_of_the_run() -> None:
    parse(["model.name=yaml:Loader"])
    assert trust.users_file().read_text() == "yaml:Loader\n"
    assert parse([recipe("yaml:Loader")])[1].run.trust == "yaml:Loader"
    trust.users_file().unlink()
    assert parse([recipe("yaml:Loader"), "run.trust=yaml:Loader"]), "as on the ranks"


@pytest.mark.parametrize("other", ["yaml:Dumper", "yaml.no_file:Dumper"])
def test_a_name_that_was_typed_once_vouches_for_no_other(other: str) -> None:
    parse(["model.name=yaml:Loader"])
    Path("recipe.yaml").write_text(f"model: {{name: 'yaml:Loader'}}\ntrain: {{loss: '{other}'}}\n")
    with pytest.raises(ConfigError, match=f"sets train.loss={other}, which may run any code"):
        parse(["recipe.yaml"])


@only_root
def test_a_name_that_was_typed_once_does_not_vouch_for_the_file_of_another_user() -> None:
    parse(["model.name=yaml:Loader"])
    os.chown(recipe("yaml:Loader"), NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="if you trust yaml, add it"):
        parse(["recipe.yaml"])


def test_a_trusted_directory_may_be_reached_by_a_link(project: Path) -> None:
    (project / "link").symlink_to(project / "recipes")
    trust.users_file().parent.mkdir(parents=True)
    trust.users_file().write_text(f"{project}/link\n")
    trust._require(f"{project}/recipes/recipe.yaml", "it", ())


@only_root
def test_the_file_of_another_user_asks_for_all_code(project: Path) -> None:
    word = recipe("my_code_of_trust:Net")
    os.chown(word, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=r"of nobody sets model\.name=my_code_of_trust:Net"):
        parse([word])
    assert parse([word, f"run.trust={project}"])
    assert parse([word, "model.name=my_code_of_trust:Net"])


@only_root
@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 2)])
def test_a_terminal_asks_once(answer: str, code: int) -> None:
    os.chown(recipe("my_code_of_trust:Net"), NOBODY, NOBODY)
    command = [sys.executable, "-m", "rollcall", "explain", "recipe.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    terminal, other = pty.openpty()
    os.write(terminal, answer.encode())
    first = subprocess.run(
        command, stdin=other, stderr=other, stdout=subprocess.PIPE, env=environment, timeout=500
    )
    assert first.returncode == code
    assert b"Do you trust" in os.read(terminal, 4096)
    os.close(other)
    os.close(terminal)
    nowhere = subprocess.DEVNULL
    second = subprocess.run(
        command, stdin=nowhere, stderr=nowhere, stdout=nowhere, env=environment, timeout=500
    )
    assert second.returncode == code


@pytest.mark.parametrize(
    ("program", "cell", "code"),
    [
        ("[digits]", "model.name: my_code_of_trust:Net", 0),
        ("[digits]", "model.name: yaml:Dumper", 2),
        ("['--', -m, rollcall.train]", "train.loss: yaml:Dumper", 2),
        ("[digits, 'train.callbacks=[yaml:Dumper]']", "seed: 1", 2),
        ("[digits, run.trust=yaml]", "seed: 1", 2),
        ("['--', script.py]", "format: csv:gz", 0),
    ],
)
def test_a_sweep_is_held_to_the_rules_of_a_file(program: str, cell: str, code: int) -> None:
    Path("script.py").write_text("")
    Path("sweep.yaml").write_text(f"program: {program}\nlist: [{{{cell}}}]\n")
    done = subprocess.run(
        [sys.executable, "-m", "rollcall", "sweep", "submit", "sweep.yaml", "--local", "--dry-run"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == code, done.stderr
    assert code == 0 or "trust" in done.stderr


@only_root
def test_a_sweep_and_a_run_of_another_user_are_not_started() -> None:
    Path("sweep.yaml").touch()
    os.chown("sweep.yaml", NOBODY, NOBODY)
    with pytest.raises(RefusedError, match=r"the sweep sweep\.yaml belongs to nobody"):
        trust.require_owner(Path("sweep.yaml"), "the sweep")
    assert not trust.users_file().exists()


def test_annotations_are_read_and_never_run(project: Path) -> None:
    attack = (
        "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close'][0]"
        f".__init__.__globals__['system']('touch {project}/pwned')"
    )
    text = f"class Net:\n    def __init__(self, a: {attack} = 3, b: {attack!r} = 3): pass\n"
    text += f"class Literals:\n    def __init__(self, a: Literal[{attack}] = 3): pass\n"
    (project / "annotated_of_trust.py").write_text(text)
    for words in (["Net", "a=5"], ["Net", "b=5"], ["Literals", "a=3"]):
        parse([f"model.name=annotated_of_trust:{words[0]}", f"model.args.{words[1]}"])
    assert not (project / "pwned").exists()
