from __future__ import annotations

import re
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollcall.config import (
    Config,
    ConfigError,
    arguments,
    checks,
    describe,
    explain,
    help,
    json_schema,
    parse,
    recipes,
    refusals,
)
from rollcall.config.read import RECIPES


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["mnits"], "did you mean 'mnist'"),
        (["absent.yaml"], "absent.yaml: no such file"),
        (["optim.rl=1"], "unknown key 'optim.rl', did you mean 'optim.lr'?"),
        (["lr=1"], "unknown key 'lr': use optim.lr (peak learning rate)"),
        (["train.epochs=many"], "train.epochs: expected a number such as 10, got 'many'"),
        (["data.global_batch=6.5"], "data.global_batch: expected an integer such as 64, got 6.5"),
        (["optim.lr=-1"], "optim.lr: expected a number above 0, got -1"),
        (["device=gpus"], "device: expected auto, cpu or cuda, got 'gpus'"),
        (["optim.lr="], "optim.lr: expected a number such as 0.001, got an empty value"),
        (["faults.hang_seconds=x"], "faults.hang_seconds: expected auto or a number, got 'x'"),
        (["precision=bf61"], "got 'bf61', did you mean 'bf16'?"),
        (["profile.steps=10"], "profile.steps=10: expected FIRST:END"),
        (["=", "1"], "expected key=value without spaces around '='"),
        (
            ["trainer.xyzzy=1"],
            "unknown key 'trainer.xyzzy'; `rollcall train --help all` lists the keys",
        ),
        (["model.flavour=1"], "unknown key 'model.flavour'; `rollcall train --help model` lists"),
        (["model.width=3"], "unknown key 'model.width': use model.hidden_size (width of"),
        (["optim.betas=0.9"], "an argument of the optimizer: optim.args.betas=[0.9, 0.95]"),
        (["model.name=net.Net"], "unknown 'net.Net'; write package.module:attribute, here net:Net"),
        (["optim.name=torch.optim.Adam"], "here torch.optim:Adam"),
        (["--prescision", "bf16"], "unknown option --prescision; write precision=bf16 ("),
        (["-m", "optim.lr=1,2"], "`rollcall sweep submit FILE` starts a run for each value"),
        (["digits", "optim.lr:0.1"], "got 'digits' and 'optim.lr:0.1', did you mean optim.lr=0.1?"),
        (["digits", "optim.lr"], "got 'digits' and 'optim.lr', did you mean optim.lr=...?"),
        (["optim.lr:0.1"], "'optim.lr:0.1': expected key=value, here optim.lr=0.1"),
        (["recipes/digits.yaml"], "'digits' without directory and suffix is a recipe"),
        (["run.name=../elsewhere"], "run.name: expected letters, digits"),
        (["--hepl"], "unknown option --hepl, did you mean '--help'?"),
        (["--printconfig"], "did you mean '--print-config'?"),
        (["--local"], "unknown option --local; it is an option of `rollcall submit`"),
        (["--name", "x"], "write run.name=NAME, or `rollcall submit --name NAME`"),
        (["ranks=2"], "`rollcall train --ranks N` sets the ranks"),
        (["./mine.py", "--lr", "1"], "./mine.py is code, not a recipe: `rollcall submit -- ./mi"),
        (["net:Net"], "'net:Net' is not a recipe; write model.name=net:Net or data.name=net:Net"),
        (["/tmp"], "/tmp: cannot be read: it is a directory; expected a YAML file"),
        (["optim.lr=1,2"], "`rollcall sweep submit FILE` starts a run for each value"),
        (["seed=0,1,2"], "`rollcall sweep submit FILE` starts a run for each value"),
        (["optim.momentum=0.9"], "optim.momentum is an option of optim.name=sgd, which"),
        (["device=gpu:0"], "unknown 'gpu:0'; use cuda"),
        (["--batch-size", "32"], "unknown option --batch-size; write data.global_batch=32 ("),
        (["gpt", "--lr=0.1"], "unknown option --lr=0.1; write optim.lr=0.1 (peak learning rate)"),
        (["--epochs", "3", "gpt"], "write train.epochs=3"),
        (["--optim.lr", "1"], "write optim.lr=1"),
        (["--compile", "train.steps=5"], "write train.compile=... ("),
        (["--resume_from_checkpoint", "x"], "under its name, run.name=NAME; model.init=NAME"),
        (["ckpt_path=runs/a"], "unknown key 'ckpt_path': a run resumes if you start it again"),
        (["--nnodes=2"], "`rollcall submit --nodes N`"),
        (["optim.lr.x=1"], "optim.lr is a key without parts; write optim.lr=1"),
        (["optim=adam"], "such as optim.name, got 'adam', did you mean optim.name=adam?"),
        (["optim.lr=[1"], "the value is not valid YAML"),
        (["digits", "mnist"], "expected one recipe or file"),
        (["data.seq_len=5"], "data.seq_len is an option of text, tokens, synthetic_tokens, which"),
        (["gpt", "data.image_size=8"], "data.image_size is an option of folder, synthetic_images"),
        (["data.micro_batch=65"], "is larger than data.global_batch=64"),
        (["profile.steps=3:1"], "profile.steps=3:1: expected FIRST:END"),
        (["checkpoint.keep_best=loss:mx"], "alone or with :max or :min"),
        (["checkpoint.keep_best=f1"], "checkpoint.keep_best=f1: an evaluation has no such figure"),
        (["train.stop_metric=:max"], "train.stop_metric=:max: expected the name of a figure"),
        (["train.steps=true"], "train.steps: expected a number or null, got True"),
        (["data.micro_batch=true"], "data.micro_batch: expected a number or null, got True"),
        (["train.metrics=a:f,b:f"], "train.metrics: expected names that differ, such as {first:"),
        (["train.metrics={f: {args: {}}}"], "unknown 'f'; name it as package.module:attribute"),
    ],
)
def test_refusals_name_the_key_and_the_cure(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(words)
    assert expected in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the file sets no key; expected lines such as train: {steps: 9}"),
        ("# train:\n", "the file sets no key"),
        ("hello", "expected lines of key: value, got a single value"),
        ("- optim", "expected lines of key: value, got a list"),
        ("model:\nname: a:Net\n", "got an empty value; indent its keys"),
        ("model: a:Net\n", "got 'a:Net', did you mean model.name=a:Net?"),
        ("model: {name: a:Net, width: 3}", ", or model.args.width for code of your own"),
        ("parallel: {static_graph: true}", "steps may leave out weights without it"),
        ("checkpoint: {auto_interval: true}", "so set checkpoint.every_minutes instead"),
    ],
)
def test_refusals_of_a_file_name_it_and_the_cure(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        parse([str(file)])
    assert str(file) in str(refusal.value) and expected in str(refusal.value)


def test_a_run_is_not_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("train: {steps: 3}")
    for word in ("first", "runs/first"):
        with pytest.raises(ConfigError, match=f"{word} is a run.* to continue it.* run.name=first"):
            parse([word])


def test_the_file_of_a_run_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """It has every key, also those that are gone since, with the values that changed nothing."""
    file = tmp_path / "config.yaml"
    gone = "static_graph: false}\ncheckpoint: {every: 7, auto_interval: false, mtbf_hours: 24}"
    file.write_text(f"parallel: {{strategy: ddp, {gone}")
    assert parse([str(file)])[1].checkpoint.every == 7


def test_momentum_may_be_for_a_group_of_weights() -> None:
    words = ["optim.name=adamw", "optim.momentum=0.5", "optim.groups={'*.bias': {optimizer: sgd}}"]
    assert parse(words)[1].optim.momentum == 0.5


def test_numbers_may_be_text() -> None:
    assert parse(["run.name=20260101"])[1].run.name == "20260101"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("parallel.strategy=fsdp2", "unknown 'fsdp2'; PyTorch's FSDP is zero3"),
        ("parallel.strategy=deepspeed", "are zero1, zero2 and zero3"),
        ("precision=32", "unknown 32; use fp32"),
        ("precision=16-mixed", "use fp16, or bf16"),
        ("device=cuda:3", "unknown 'cuda:3'; use cuda;"),
        ("batch_size=8", "use data.global_batch (number of samples per step, over all ranks)"),
        ("train.max-steps=8", "unknown key 'train.max-steps': use train.steps"),
        ("trainer.gradient_accumulation_steps=8", "use data.micro_batch"),
        ("nodes=2", "unknown key 'nodes': `rollcall submit --nodes N`"),
    ],
)
def test_words_of_other_frameworks_are_answered(words: str, answer: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse([words])
    assert answer in str(refusal.value)


def test_answers_name_keys_and_values_that_exist() -> None:
    keys = {name: kind for name, kind, *_ in describe()}
    tables = refusals.synonyms()
    for meant in tables["keys"].values():
        parse([meant] if "=" in meant else [])
    meant = {meant.partition("=")[0] for meant in tables["keys"].values()}
    assert meant | set(tables["values"]) <= set(keys)
    last_parts = {name.rpartition(".")[2] for name in keys if "." in name}
    for words in (*tables["keys"], *tables["elsewhere"]):
        for word in words.split():
            # The nearest-word hint handles a key without its section, except for lr.
            assert (
                word in ("lr", "micro_batch", "ranks", "root", "steps") or word not in last_parts
            ), word
    for key, answers in tables["values"].items():
        for words in answers:
            assert not set(words.split()) & set(keys[key].split(" | ")), key


def test_a_mistake_in_a_file_names_the_file(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("optim: {lr: fast}\nlr: 1\n")
    with pytest.raises(ConfigError) as refusal:
        parse([str(recipe), "seed=x"])
    lines = str(refusal.value).splitlines()
    assert sorted(line.startswith(f"{recipe}: ") for line in lines) == [False, True, True]
    assert "seed: expected an integer such as 0, got 'x'" in lines


def test_a_mistake_in_yaml_names_line_and_column(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("optim:\n\tlr: 1\n")
    expected = "mine.yaml: not valid YAML, line 2, column 1: indent with spaces, not with tabs"
    with pytest.raises(ConfigError, match=expected):
        parse([str(recipe)])
    recipe.write_text("a: [\n")
    with pytest.raises(ConfigError, match="not valid YAML, line 2, column 1: did not find"):
        parse([str(recipe)])
    recipe.write_text("optim: {lr: 1}\nseed: 1\noptim: {name: sgd}\n")
    with pytest.raises(ConfigError, match="line 3, column 1: the key 'optim' is given twice"):
        parse([str(recipe)])
    with pytest.raises(ConfigError, match="the key 'lr' is given twice"):
        parse(["optim={lr: 1, lr: 2}"])
    with pytest.raises(ConfigError, match=r"did you mean '.*/mine\.yaml'"):
        parse([str(tmp_path / "mien.yaml")])


def test_help_is_short_or_about_a_section_or_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> str:
        assert help.main(["--help", *words]) == 0
        return capsys.readouterr().out

    short = shown()
    assert len(short.splitlines()) < 45 and max(map(len, short.splitlines())) < 110
    assert all(name in short for name in (*recipes(), "checkpoint", "exact_shards"))
    assert shown("digits") == short
    assert shown("optim.lr") == "optim.lr  (number; default: 0.001)\n    Peak learning rate.\n"
    section = shown("optim")
    assert "optim.warmup_steps  (integer; default: 0)" in section and "\ndata." not in section
    assert all(f"\n{name}  (" in f"\n{shown('all')}" for name, *_ in describe())


@pytest.mark.parametrize(
    ("topic", "answer"),
    [
        ("optm", "unknown section 'optm', did you mean 'optim'?"),
        ("optim.rl", "unknown key 'optim.rl', did you mean 'optim.lr'?"),
        ("batch_size", "unknown key 'batch_size': use data.global_batch"),
    ],
)
def test_a_misspelt_topic_of_help_is_answered(
    topic: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert help.main(["--help", topic]) == 2
    assert answer in capsys.readouterr().err


def test_words_override_the_file_and_numbers_are_numbers(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("optim: {lr: 1e-4, name: sgd}\nmodel: {name: mlp}\n")
    name, parsed = parse([str(recipe), "optim.lr=2e-3", "checkpoint.every=null"])
    assert name == "mine"
    assert (parsed.optim.lr, parsed.optim.name) == (2e-3, "sgd")
    assert parsed.checkpoint.every is None


@pytest.mark.parametrize(
    ("text", "key"), [("1: 2", "1"), ("null: 2", "None"), ("optim: {1: 2}", "optim.1")]
)
def test_a_key_that_is_no_text_is_unknown(tmp_path: Path, text: str, key: str) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(text)
    with pytest.raises(ConfigError, match=rf"mine\.yaml: unknown key '{re.escape(key)}'"):
        parse([str(recipe)])


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "- 1\n- 2\n",
        "!!python/object/apply:os.system [id]",
        "optim: &all {groups: *all}",
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str) -> None:
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(text)
    with pytest.raises(
        ConfigError, match=r"bad\.yaml: (not valid YAML|expected lines of key: value)"
    ):
        parse([str(recipe)])


@pytest.mark.parametrize("recipe", recipes())
def test_resolved_config_reads_back(tmp_path: Path, recipe: str) -> None:
    _, parsed = parse([recipe])
    saved = tmp_path / "config.yaml"
    saved.write_text(parsed.to_yaml())
    assert parse([str(saved)])[1] == parsed


def test_shipped_schema_is_current() -> None:
    shipped = (RECIPES / "schema.json").read_text()
    assert shipped == json_schema(), "run docs/make.py"


def test_every_key_is_explained() -> None:
    assert [key.name for key in describe() if not key.meaning] == []


def test_config_run_and_hosts_are_free_of_torch() -> None:
    code = "import sys, rollcall.config, rollcall.records.run_dir, rollcall.system.hosts; "
    code += "sys.exit('torch' in sys.modules)"
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
    names = {setting.partition("=")[0] for setting in shown}
    left = {key.name for key in describe()} - names
    assert left == {"optim.args", "train.loss_args"}  # one line for each argument


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("faults.divergence=off", "faults.divergence", "off"),
        ("run.name=2026-11-22", "run.name", "2026-11-22"),
        ("run.name=2026-02-30", "run.name", "2026-02-30"),
        ("run.name=no", "run.name", "no"),
        ("exact=yes", "exact", True),
        ("seed=010", "seed", 10),
        ("optim.lr=1e-3", "optim.lr", 1e-3),
        ("train.steps=1e3", "train.steps", 1000),
        ("checkpoint.every=null", "checkpoint.every", None),
        ("checkpoint.every=", "checkpoint.every", None),
    ],
)
def test_values_are_read_as_they_look_and_written_so_that_they_read_back(
    tmp_path: Path, words: str, key: str, value: Any
) -> None:
    _, config = parse([words])
    assert reduce(getattr, key.split("."), config) == value
    written = tmp_path / "config.yaml"
    written.write_text(config.to_yaml())
    assert parse([str(written)])[1] == config
    assert Config.model_validate(yaml.safe_load(written.read_text())) == config, "YAML 1.1 too"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("seed=!!int x", "not valid YAML"),
        ("seed=!!timestamp x", "not valid YAML"),
        ("run.name=!!timestamp 2026-02-30", "not valid YAML"),
        ("optim.lr=1e400", "expected a finite number, got inf"),
        ("optim.lr=.nan", "expected a finite number, got nan"),
        ("seed=2:00", "expected an integer such as 0, got '2:00'"),
        ("seed=" + "[" * 60_000, "not valid YAML"),
        ("seed=" + "- " * 60_000, "not valid YAML"),
        ("seed=" + "9" * 5000, "seed: expected"),
    ],
)
def test_values_that_no_key_has_are_refused(tmp_path: Path, word: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        parse([word])
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(word.replace("=", ": ", 1).replace("run.name: ", "run: {name: ") + "\n")
    with pytest.raises(ConfigError):
        parse([str(recipe)])


def test_only_choices_get_a_hint() -> None:
    with pytest.raises(ConfigError) as refused:
        parse(["run.name=_x"])
    assert "did you mean" not in str(refused.value)


def test_a_recipe_of_your_own_needs_its_suffix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(ConfigError, match=r"unknown recipe 'mine', did you mean '\./mine\.yaml'"):
        parse(["mine"])


def test_packages_and_data_are_looked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    _, config = parse(["log.to=mlflow"])
    with pytest.raises(ConfigError, match=r"log.to=mlflow needs the package mlflow: pip"):
        arguments.check_surroundings(config)
    _, config = parse(["data.name=folder", "data.path=/absent"])
    with pytest.raises(ConfigError, match=r"data.path: /absent does not exist; expected"):
        arguments.check_surroundings(config)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.path=photos"], "data.path=photos has no effect on data.name=digits: remove it"),
        (
            ["optim.warmup_steps=9", "train.steps=5"],
            "warmup_steps=9 is more than train.steps=5: reduce it",
        ),
        (["train.epochs=2", "train.steps=5"], "no effect beside train.steps=5"),
        (["train.steps=5"], ""),  # the recipe has a longer warm-up
        (["optim.warmup_steps=5", "train.steps=5"], ""),
        (["optim.warmup_steps=5000"], ""),
        (["gpt", "data.path=books"], ""),
        (["data.name=mine:load", "data.path=photos"], ""),
    ],
)
def test_what_has_no_effect_is_said_and_not_refused(words: list[str], said: str) -> None:
    _, config = parse(words)
    remarks = [*checks.without_effect(config, {word.partition("=")[0] for word in words})]
    assert said in "".join(remarks) and len(remarks) == bool(said)


@pytest.mark.parametrize(
    ("words", "width", "layers"),
    [
        (["model.size=1b"], 2048, 16),
        (['model.size="1b"'], 2048, 16),
        (["model={size: 1b, name: llama}"], 2048, 16),
        (["model.size=1b", "model.num_layers=2"], 2048, 2),
        (["model={size: 1b, num_layers: 2}"], 2048, 2),
    ],
)
def test_a_size_gives_the_numbers_that_no_word_sets(
    words: list[str], width: int, layers: int
) -> None:
    _, config = parse(words)
    assert (config.model.hidden_size, config.model.num_layers) == (width, layers)
