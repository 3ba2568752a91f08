"""Prompts and answers as JSON lines: only the answers are targets, and bad lines are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from rollcall.config import ConfigError, parse
from rollcall.train.data import sets
from rollcall.train.data.order import Order, training_batches
from rollcall.train.models import build
from rollcall.train.numerics import losses
from rollcall.train.numerics.losses import outputs_of
from rollcall.train.ranks.world import World

WORDS = ["<end>", "<user>", "<assistant>", "two", "plus", "one", "three", "is", "zero", "and", "?"]
WORDS += ["."]
TEMPLATE = (
    "{% for one in messages %}<{{ one.role }}> {{ one.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [
    {"role": "user", "content": "two plus one ?"},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": "and zero ?"},
    {"role": "assistant", "content": "is zero"},
]
ROWS: list[dict[str, Any]] = [
    {"prompt": "two plus one is", "answer": "three ."},
    {"messages": TALK},
    {"prompt": "zero plus one is", "answer": "one ."},
    {"messages": TALK[:2]},
]
ASKED = "<user> two plus one ? <end> <assistant> three <end>"
TEXTS = {
    "two plus one is three . <end>": "0000111",
    f"{ASKED} <user> and zero ? <end> <assistant> is zero <end>": "000000011000000111",
    "zero plus one is one . <end>": "0000111",
    ASKED: "000000011",
}
"""The tokens of these rows, and a 1 for each that is an answer's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of words, with a chat template."""
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(WORDS)}
    whole = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="."))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = library.PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<end>")
    made.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(path)
    return path


def written(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def words_of(path: Path, folder: Path, *more: str) -> list[str]:
    words = ["device=cpu", "data.name=jsonl", f"data.path={path}", "data.global_batch=4"]
    return [*words, f"data.args.tokenizer={folder}", f"data.args.validation={path}", *more]


def numbers(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def test_without_a_tokenizer_every_way_to_the_data_says_so(world: World, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", ROWS)
    config = parse(["data.name=jsonl", f"data.path={path}", "data.global_batch=4"])[1]
    with pytest.raises(ConfigError, match=r"jsonl needs data\.args\.tokenizer, the folder of"):
        sets.load(config.data, world)


def test_only_answers_are_targets(world: World, folder: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", ROWS)
    config = parse(words_of(path, folder, "data.pad=true"))[1]
    rows: Any = sets.load(config.data, world).train
    assert rows[0]["input_ids"] == numbers("two plus one is three .")
    assert rows[0]["labels"] == [-100] * 3 + numbers("three . <end>")
    assert rows[1]["input_ids"] == numbers([*TEXTS][1])[:-1]
    first, second = numbers("three <end>"), numbers("is zero <end>")
    assert rows[1]["labels"] == [-100] * 6 + first + [-100] * 6 + second
    cut = parse(words_of(path, folder, "data.args.max_length=7"))[1]
    short: Any = sets.load(cut.data.model_copy(update={"pad": True}), world).train
    assert short[1]["labels"] == rows[1]["labels"][:7]


def test_every_20th_line_validates(world: World, folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "is " * number, "answer": "one"} for number in range(1, 42)]
    path = written(tmp_path / "a.jsonl", rows)
    words = [word for word in words_of(path, folder, "data.pad=true") if "validation" not in word]
    source = sets.load(parse(words)[1].data, world)
    found: Any = source.validation
    assert [len(found[number]["input_ids"]) for number in range(len(found))] == [21, 41]
    assert source.train_size == 39


@pytest.mark.parametrize("form", ["data.pad=true", "data.pack=24"])
def test_the_loss_is_that_of_plain_pytorch(
    form: str, world: World, folder: Path, tmp_path: Path
) -> None:
    path = written(tmp_path / "a.jsonl", ROWS)
    sizes = "hidden_size=16 intermediate_size=32 num_hidden_layers=2 num_attention_heads=2"
    words = words_of(path, folder, form, "model.name=transformers", "model.args.base=llama")
    config = parse([*words, *(f"model.args.{size}" for size in sizes.split())])[1]
    source, loss = sets.load(config.data, world), losses.of(config)
    model = build(config.model, source).eval()
    batches = training_batches(source, Order.of_run(config, source), range(4), range(1))
    batch = next(batches)
    with torch.no_grad():
        sums, weights = loss(outputs_of(model, batch), batch.targets)
        found = (sums * batch.weights).sum() / (weights * batch.weights).sum()
        total, count = torch.zeros(()), 0
        for text, marks in TEXTS.items():  # each alone
            tokens = torch.tensor([numbers(text)])
            logits = outputs_of(model, batch._replace(inputs=tokens))[0]
            for place in range(1, len(marks)):
                if marks[place] == "1":
                    total += functional.cross_entropy(logits[place - 1], tokens[0, place])
                    count += 1
    assert count == 13
    assert found.item() == pytest.approx(total.item() / count, rel=1e-6)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "JSONDecodeError: Expecting property name"),
        ("[1]", "with texts under prompt and answer"),
        ({"question": "x", "answer": "y"}, "data.args.prompt and data.args.answer name other keys"),
        ({"prompt": "x", "answer": 3}, ": other values"),
        ({"prompt": "x", "answer": ""}, ": other values"),
        ("[" * 100_000, "RecursionError"),
        ({"messages": TALK[:1]}, "one of them with the role assistant"),
        ({"messages": "two"}, "messages, a list of objects with role and content"),
    ],
)
def test_a_bad_line_is_named(
    line: Any, problem: str, world: World, folder: Path, tmp_path: Path
) -> None:
    path = written(tmp_path / "a.jsonl", [ROWS[0], "", line])
    with pytest.raises(ConfigError) as caught:
        sets.load(parse(words_of(path, folder, "data.pad=true"))[1].data, world)
    assert str(caught.value).startswith(f"{path}:3: ") and problem in str(caught.value)


def test_a_row_may_lack_messages_or_begin_with_an_answer(
    world: World, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = [ROWS[0] | {"messages": None}, ROWS[0] | {"messages": []}, {"messages": TALK[1:3]}]
    path = written(tmp_path / "a.jsonl", empty)
    config = parse(words_of(path, folder, "data.pad=true"))[1].data
    rows: Any = sets.load(config, world).train
    assert rows[0] == rows[1] and len(rows[0]["labels"]) == 6
    assert len(rows[2]["labels"]) == 2
    monkeypatch.setattr(rows.tokenizer, "chat_template", "{{ raise_exception('roles') }}")
    with pytest.raises(ConfigError, match=r"a\.jsonl:3: the chat template refuses .* roles"):
        sets.load(config, world)


def test_missing_parts_are_named(world: World, folder: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", ROWS)
    for words, problem in (
        (["data.name=jsonl", f"data.path={path}"], "neither model.init nor model.args.base"),
        (["data.name=jsonl", f"model.init={folder}"], "needs data.path: files with one JSON"),
        (["data.name=jsonl", f"data.path={path}", f"model.init={path.parent}/no"], "neither model"),
        (words_of(path, path.parent), "data.args.tokenizer=.*: no tokenizer"),
    ):
        with pytest.raises(ConfigError, match=problem):
            sets.load(parse(words)[1].data, world)


def test_targets_are_not_shifted_twice(world: World, folder: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", ROWS)
    for name in ("next_token", "model"):
        words = [
            "data.pad=true",
            f"train.loss={name}",
            "model.name=transformers",
            "model.args.base=x",
        ]
        config = parse(words_of(path, folder, *words))[1]
        with pytest.raises(ConfigError, match=f"train.loss={name} predicts each target from those"):
            sets.load(config.data, world).learned_by(losses.of(config))
