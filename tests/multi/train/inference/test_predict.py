"""Predictions come in order and once, for every strategy and after every stop."""

from __future__ import annotations

import math
import os
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import until
from PIL import Image
from ranks import Ranks, train
from sklearn.datasets import load_digits
from user_tasks import Sentences

from rollcall.system.files import read_lines
from rollcall.train.inference import trained
from rollcall.train.inference.generate import tokens
from rollcall.train.ranks.world import World

VALIDATION = 359


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned something; its evaluation uses the average of the weights."""
    root = tmp_path_factory.mktemp("predict")
    words = ["digits", f"run.root={root}", "run.name=run", "train.steps=60", "model.hidden_size=16"]
    train(2, [*words, "optim.ema=0.8", "optim.evaluate_ema=true"], root / "logs")
    return root / "run"


def predict(ranks: int, run: Path, output: Path, *more: str) -> list[dict[str, Any]]:
    train(ranks, ["predict", str(run), "--output", str(output), *more], output.parent / "logs")
    assert not output.with_name(f"{output.name}.parts").exists()
    return [*read_lines(output)]


@pytest.fixture(scope="module")
def alone(run: Path) -> list[dict[str, Any]]:
    return predict(1, run, run.parent / "alone.jsonl", "parallel.strategy=single")


def test_one_process_predicts_what_the_evaluation_counted(
    run: Path, alone: list[dict[str, Any]]
) -> None:
    assert [line["sample"] for line in alone] == [*range(VALIDATION)]
    targets = load_digits().target[4::5]
    assert [line["target"] for line in alone] == targets.tolist()
    hits = sum(line["prediction"] == line["target"] for line in alone)
    evaluated = [line for line in read_lines(run / "events.jsonl") if line["event"] == "evaluated"]
    assert hits / VALIDATION == pytest.approx(evaluated[-1]["accuracy"], abs=1e-6)
    assert hits / VALIDATION > 0.5


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (3, ("--batch", "7", "data.num_workers=1")),
        (1, ("--batch", "99999999999")),
        (1, ("parallel.mesh=pipeline=2,tensor=2",)),  # as of a run that trained on more ranks
        (2, ("parallel.strategy=zero3",)),
        (4, ("parallel.mesh=pipeline=2,tensor=2", "data.micro_batch=8")),
    ],
)
def test_many_ranks_predict_the_same(
    tmp_path: Path, run: Path, alone: list[dict[str, Any]], ranks: int, more: tuple[str, ...]
) -> None:
    lines = predict(ranks, run, tmp_path / "lines.jsonl", *more)
    assert len(lines) == len(alone)
    for line, expected in zip(lines, alone, strict=True):
        assert line == {**expected, "probability": pytest.approx(expected["probability"], rel=1e-4)}


PACKED = ("data.pack=16", "model.name=gpt", "model.hidden_size=16", "model.num_layers=2")
PADDED = ("data.pad=true", "model.name=user_tasks:Net")


@pytest.mark.parametrize("more", [PACKED, PADDED], ids=["packed", "padded"])
def test_rows_of_unequal_length_are_predicted_one_by_one(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    words = ["data.name=user_tasks:words", "train.loss=next_token", *more]
    words += ["data.global_batch=6", "train.steps=3", "optim.lr=0.01"]
    train(1, [*words, f"run.root={tmp_path}", "run.name=run"], tmp_path / "logs")
    run = tmp_path / "run"
    lines = predict(1, run, tmp_path / "lines.jsonl")
    lengths = [len(Sentences(11)[line["sample"]]["labels"]) for line in lines]
    assert [len(line["prediction"]) for line in lines] == lengths
    events = read_lines(run / "events.jsonl")
    [evaluated] = [line for line in events if line["event"] == "evaluated"]
    mean = np.average([line["loss"] for line in lines], weights=np.array(lengths) - 1)
    assert len(lines) == 11
    assert mean == pytest.approx(evaluated["loss"], rel=1e-5)
    others = predict(2, run, tmp_path / "others.jsonl", "--batch", "2")
    for line, other in zip(lines, others, strict=True):
        assert other == {**line, "loss": pytest.approx(line["loss"], rel=1e-5)}


@pytest.mark.long
def test_kill_and_stop_lose_no_part_and_repeat_none(tmp_path: Path, run: Path) -> None:
    whole = predict(1, run, tmp_path / "whole.jsonl", "--split", "train", "--batch", "2")
    output = tmp_path / "parts.jsonl"
    words = ["predict", str(run), "--output", str(output), "--split", "train", "--batch", "1"]
    words += ["model.name=user_code:gated"]
    parts = tmp_path / "parts.jsonl.parts"
    kept: dict[Path, int] = {}
    for ending, count in ((signal.SIGKILL, 2), (signal.SIGTERM, 6)):
        gate = tmp_path / ending.name
        # A part is 180 passes: both ranks wait in their second one.
        ranks = Ranks(2, words, tmp_path / "logs", {"GATE": f"200:300:{gate}"})
        until(lambda: len([*parts.glob("[0-9]*.jsonl")]) == len(kept) + 2)
        if ending == signal.SIGKILL:
            ranks.kill()
        else:
            os.kill(ranks.processes[1].pid or 0, ending)
            gate.touch()
            assert ranks.wait() == [os.EX_TEMPFAIL] * 2, ranks.output()
        kept.update({path: path.stat().st_mtime_ns for path in parts.glob("[0-9]*.jsonl")})
        assert len(kept) == count and not output.exists()
    again = ["predict", str(run), "--output", str(output)]
    ranks = Ranks(1, again, tmp_path / "logs")
    assert ranks.wait() == [2] and "contains parts of another prediction (input" in ranks.output()
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    train(1, words, tmp_path / "logs")
    for line, expected in zip(read_lines(output), whole, strict=True):
        assert line == {**expected, "probability": pytest.approx(expected["probability"], rel=1e-4)}
    ranks = Ranks(1, words, tmp_path / "logs")
    assert ranks.wait() == [2] and "exists; delete it" in ranks.output()
    parts.mkdir()
    (parts / "plan.json").write_text("{")
    ranks = Ranks(2, words, tmp_path / "logs")
    assert ranks.wait() == [2, 2] and "contains parts of another" in ranks.output()


def test_files_of_the_user(tmp_path: Path, run: Path, alone: list[dict[str, Any]]) -> None:
    pixels = load_digits().images[4::5]
    for number in range(10):
        image = Image.fromarray((pixels[number] * 255 / 16).round().astype(np.uint8))
        image.save(tmp_path / f"{number}.png")
    (tmp_path / "7.png").write_bytes(b"no image")
    words = ["--input", f"{tmp_path}/*.png", "data.skip_unreadable=1", "--batch", "4"]
    lines = predict(2, run, tmp_path / "files.jsonl", *words)
    for number, line in enumerate(lines):
        assert (line["sample"], line["file"]) == (number, f"{tmp_path}/{number}.png")
        if number == 7:
            assert line["error"] == "cannot be read"
        else:
            assert line["prediction"] == alone[number]["prediction"]
            assert line["probability"] == pytest.approx(alone[number]["probability"], rel=0.02)
    (tmp_path / "files.jsonl").unlink()
    words = ["predict", str(run), *words, "--output", str(tmp_path / "files.jsonl")]
    ranks = Ranks(2, [*words, "data.skip_unreadable=0"], tmp_path / "logs")
    assert ranks.wait() == [2, 2]
    assert ranks.output().count(f"cannot read sample 7 of the input ({tmp_path}/7.png)") == 1


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer that knows one line by heart."""
    root = tmp_path_factory.mktemp("generate")
    (root / "text.txt").write_text("def one(two): return three\n" * 200)
    words = ["gpt", f"run.root={root}", "run.name=run", f"data.path={root}/text.txt"]
    words += ["data.seq_len=16", "model.hidden_size=32", "model.num_layers=2", "train.steps=150"]
    train(1, [*words, "optim.lr=1e-2"], root / "logs")
    (root / "text.txt").unlink()  # a model that is trained needs its data no more
    return root / "run"


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, ()),
        (2, ("parallel.strategy=zero3",)),
        pytest.param(2, ("parallel.mesh=tensor=2",), marks=pytest.mark.long),
        (2, ("parallel.mesh=tensor=2", "parallel.sequence_parallel=true")),
        pytest.param(2, ("parallel.mesh=context=2",), marks=pytest.mark.long),
    ],
)
def test_generated_text(tmp_path: Path, writer: Path, ranks: int, more: tuple[str, ...]) -> None:
    words = ["generate", str(writer), "--prompt", "def one(", "--length", "45"]
    output = train(ranks, [*words, "--temperature", "0", *more], tmp_path / "logs")
    assert "def one(two): return three\ndef one(two): return three\n" in output
    assert "45 tokens, " in output


def test_a_token_is_computed_once_as_long_as_the_text_has_positions(writer: Path) -> None:
    run_dir, config = trained.find(str(writer), ["device=cpu"])
    world = World.join("cpu")
    texts, lengths = [], list[int]()
    with trained.load(run_dir, config, world, with_data=False) as model:
        model.strategy.model.register_forward_pre_hook(
            lambda _, inputs, named: lengths.append((*inputs, *named.values())[0].shape[1]),
            with_kwargs=True,
        )
        for caches in (True, False):
            texts.append([*islice(tokens(model, world, [*b"def"], 2.0, caches=caches), 20)])
    world.leave()
    assert texts[0] == texts[1]
    assert lengths == [3] + [1] * 13 + [16] * 26


def test_seed_and_temperature_choose_the_text(tmp_path: Path, writer: Path) -> None:
    texts = []
    for number, seed in enumerate((0, 0, 1)):
        words = ["generate", str(writer), "--tokens", "100,101", "--temperature", "3"]
        words += ["--seed", str(seed), "--length", "30", "--top-k", "40"]
        texts.append(train(1, words, tmp_path / str(number)).split("\nrollcall")[0])
    assert texts[0] == texts[1] != texts[2]
    ranks = Ranks(1, ["generate", str(writer), "--tokens", "300"], tmp_path / "refused")
    assert ranks.wait() == [2] and "expected numbers below 256, got 300" in ranks.output()


def test_lines_of_a_text_have_its_loss(tmp_path: Path, writer: Path) -> None:
    (tmp_path / "known.txt").write_text("def one(two): return three\n" * 3)
    (tmp_path / "strange.txt").write_text("ENO(OWT)eerht ... NRUTER --- fed" * 3)
    losses = []
    for name in ("known", "strange"):
        words = ["--input", f"{tmp_path}/{name}.txt"]
        lines = predict(1, writer, tmp_path / f"{name}.jsonl", *words)
        losses.append(sum(line["loss"] for line in lines) / len(lines))
        assert len(lines[0]["prediction"]) == 16
    assert losses[0] < 1 < losses[1]
    events = read_lines(writer / "events.jsonl")
    evaluated = [line for line in events if line["event"] == "evaluated"][-1]
    assert (
        evaluated["perplexity"] == pytest.approx(math.exp(evaluated["loss"]))
        and evaluated["perplexity"] < 3
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["predict", "nowhere"], "unknown run 'nowhere'"),
        (["predict", "{run}", "--output", "x.csv"], "expected a file that ends in .jsonl"),
        (["predict", "{run}", "--inptu=x", "x"], "--inptu=x x, did you mean '--input'?"),
        (["predict", "{run}", "data.name=user_code:unvalidated"], "validation: no samples"),
        (["predict", "{run}", "data.name=user_code:streamed"], "is a stream without numbers"),
        (["predict", "{run}", "model.name=user_code:in_a_dictionary"], "one tensor of outputs"),
        (["generate", "{run}", "--prompt", "x"], "but this run was trained on digits"),
        (["generate", "{run}", "--tokens", "1"], "only models of sequences can generate"),
        (
            ["generate", "{run}", "--tokens", "1", "--temperature", "nan"],
            "--temperature: expected at least 0",
        ),
        (["predict", "{run}", "--input", "{run}/none"], "no file matches '{run}/none'"),
    ],
)
def test_refusals(tmp_path: Path, run: Path, words: list[str], problem: str) -> None:
    ranks = Ranks(1, [word.format(run=run) for word in words], tmp_path / "logs")
    assert ranks.wait() == [2], ranks.output()
    assert problem.format(run=run) in ranks.output() and "Traceback" not in ranks.output()
