from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from train import config, explain
from train.config import Config, ConfigError, parse


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["mnits"], "did you mean 'mnist'"),
        (["absent.yaml"], "absent.yaml: there is no such file"),
        (["optim.rl=1"], "unknown key 'optim.rl', did you mean 'optim.lr'?"),
        (["lr=1"], "unknown key 'lr', did you mean 'optim.lr'?"),
        (["train.epochs=many"], "train.epochs: input should be a valid number"),
        (["data.global_batch=6.5"], "data.global_batch: input should be a valid integer"),
        (["optim.lr=-1"], "optim.lr: input should be greater than 0, not -1"),
        (["device=gpu"], "device: input should be 'auto', 'cpu' or 'cuda', not 'gpu'"),
        (["run.name=../elsewhere"], "run.name: expected letters, digits"),
        (["--hepl"], "there is no option --hepl"),
        (["optim.lr.x=1"], "'lr' is not a group of keys"),
        (["optim=adam"], "optim: "),
        (["optim.lr=[1"], "the value is not YAML"),
        (["digits", "mnist"], "one recipe or file is expected"),
        (["data.micro_batch=65"], "is larger than data.global_batch=64"),
    ],
)
def test_refusals_name_the_key_and_the_cure(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(words)
    assert expected in str(refusal.value)


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(["sede=1", "optim.lr=fast"])
    assert len(str(refusal.value).splitlines()) == 2


def test_words_override_the_file_and_numbers_are_numbers(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("optim: {lr: 1e-4, name: sgd}\nmodel: {name: mlp}\n")
    name, parsed = parse([str(recipe), "optim.lr=2e-3", "checkpoint.every=null"])
    assert name == "mine"
    assert (parsed.optim.lr, parsed.optim.name) == (2e-3, "sgd")
    assert parsed.checkpoint.every is None


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "!!python/object/apply:os.system [id]"])
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str) -> None:
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml: (is not YAML|expected 'key: value')"):
        parse([str(recipe)])


@pytest.mark.parametrize("recipe", config.recipes())
def test_resolved_config_reads_back(tmp_path: Path, recipe: str) -> None:
    _, parsed = parse([recipe])
    saved = tmp_path / "config.yaml"
    saved.write_text(parsed.to_yaml())
    assert parse([str(saved)])[1] == parsed


def test_shipped_schema_is_current() -> None:
    shipped = (config.RECIPES / "schema.json").read_text()
    assert shipped == config.schema(), (
        "run: python -m train --print-schema > train/recipes/schema.json"
    )


def test_every_key_is_explained() -> None:
    described = list(config.describe())
    assert {"seed", "optim.lr", "data.micro_batch"} <= {name for name, *_ in described}
    assert all(meaning for *_, meaning in described)
    assert Config().seed == 0


def test_config_run_and_hosts_are_free_of_torch() -> None:
    code = (
        "import sys, train, train.config, train.run, train.hosts; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_value_has_an_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("optim: {lr: 1e-4, name: sgd}\n")
    assert explain.main([str(recipe), "optim.lr=2e-3", "train.steps=null"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {setting.strip(): origin for setting, _, origin in (x.partition("  # ") for x in lines)}
    assert shown["optim.name=sgd"] == str(recipe)
    assert shown["optim.lr=0.002"] == shown["train.steps=null"] == "command line"
    assert shown["optim.weight_decay=0.0"] == "default"
    assert len(shown) == len(list(config.describe()))
