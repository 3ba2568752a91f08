"""Fine-tuning as users do it: text in, text out, and a folder for plain transformers."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from ranks import logged_steps, train

from rollcall.records.run_dir import RunDir
from rollcall.train.checkpoint.tools.command import main as checkpoint
from rollcall.train.data.source import Batch
from rollcall.train.inference import trained
from rollcall.train.inference.generate import main as generate
from rollcall.train.inference.generate import tokens
from rollcall.train.main import main
from rollcall.train.ranks.world import World

EXAMPLE = ROOT / "examples/finetune"
PROMPT = "The capital of Peru is"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, and a run that has trained adapters for a few steps."""
    pytest.importorskip("peft", reason="peft is not installed")
    torch.set_num_threads(1)  # on a busy machine, threads wait for each other in every operation
    folder = tmp_path_factory.mktemp("finetune")
    for path in EXAMPLE.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        runpy.run_path("prepare.py")
        words = ["./lora.yaml", "model.init=tiny", "model.args.base=tiny", "train.steps=3"]
        words += ["device=cpu", "run.name=run", "optim.lr=0.1", "optim.warmup_steps=0"]
        assert main(words) == 0
    return folder


def test_a_cache_and_a_merge_change_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    library = importlib.import_module("transformers")
    assert checkpoint(["export", "run", "merged", "--format", "hf", "--merge"]) == 0
    plain = library.AutoModelForCausalLM.from_pretrained("merged").eval()
    tokenizer = library.AutoTokenizer.from_pretrained("merged")
    assert plain.config.use_cache and tokenizer.chat_template
    prompt = tokenizer(PROMPT)["input_ids"]
    ids = torch.randint(len(tokenizer), (2, 30), generator=torch.Generator().manual_seed(0))
    run_dir, config = trained.find("run", [])
    world = World.join("cpu")
    with trained.load(run_dir, config, world, with_data=False) as model:
        found = model.outputs(Batch({"input_ids": ids}, (), torch.ones(2)))
        texts = [
            [*islice(tokens(model, world, prompt, temperature, caches=caches), 12)]
            for temperature in (0.0, 1.0)
            for caches in (True, False)
        ]
        last = [*islice(tokens(model, world, ids.flatten().tolist() * 4 + prompt, 0.0), 99)]
    world.leave()
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
        base = library.AutoModelForCausalLM.from_pretrained("tiny")(input_ids=ids).logits
        words: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        text = plain.generate(torch.tensor([prompt]), use_cache=False, **words)
    assert (found - expected).abs().max() < 1e-5 < 0.1 < (found - base).abs().max()
    assert texts[0] == texts[1] == text[0, len(prompt) :].tolist()
    assert texts[2] == texts[3] != texts[0]
    assert len(last) == plain.config.max_position_embeddings - 4 * ids.numel() - len(prompt)


def test_a_run_of_json_lines_resumes_on_other_ranks(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    paths = {"data.path": "capitals.jsonl", "model.init": "tiny", "model.args.base": "tiny"}
    words = [f"{key}={place / name}" for key, name in {**paths, "run.root": "runs"}.items()]
    words += ["device=cpu", "run.name=cut", "optim.lr=0.1", "optim.warmup_steps=0"]
    train(2, [str(place / "lora.yaml"), *words, "train.steps=2"], place / "logs")
    assert main([str(place / "lora.yaml"), *words, "train.steps=3"]) == 0
    whole, cut = (
        {line["step"]: line["loss"] for line in logged_steps(RunDir("runs", name))}
        for name in ("run", "cut")
    )
    assert whole.keys() & cut.keys() == {1, 3}
    assert [cut[1], cut[3]] == pytest.approx([whole[1], whole[3]], rel=1e-5)


def test_text_goes_in_and_comes_out(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    (place / "capitals.jsonl").rename(place / "elsewhere")  # it is needed no more
    words = ["generate", "run", "--prompt", PROMPT, "--length", "12", "--seed", "3"]
    assert main(words) == 0
    text = capsys.readouterr().out
    both = train(2, [*words, "parallel.strategy=zero3"], place / "logs")
    (place / "elsewhere").rename(place / "capitals.jsonl")
    assert text.startswith(PROMPT) and text in both
    ours, theirs = os.pipe()
    os.write(theirs, b"What is the capital of Peru?\n\n")
    os.close(theirs)
    monkeypatch.setattr("sys.stdin", os.fdopen(ours))
    assert generate(["run", "--chat", "--length", "3"]) == 0
    assert capsys.readouterr().err.count(" tokens, ") == 2


def test_an_old_library_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packed rows would attend to each other without a word."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(importlib.import_module("transformers"), "__version__", "4.55.4")
    assert generate(["run", "--prompt", PROMPT]) == 2
    assert "needs transformers 4.56 or newer, found 4.55.4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--tokens", "1,9999"], "expected numbers below "),
        (["--prompt", PROMPT * 60], "tokens, but the model has 256 positions"),
        (["--prompt", PROMPT, "--tokenizer", "nowhere"], "nowhere: no tokenizer"),
    ],
)
def test_refused_prompts(
    words: list[str],
    problem: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    assert generate(["run", *words]) == 2
    assert problem in capsys.readouterr().err
    assert checkpoint(["export", "run", "x", "--format", "peft", "--merge"]) == 2


@pytest.mark.long
def test_the_example_as_it_is_typed(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    for path in EXAMPLE.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    said = ""
    for line in re.findall(r"^#     (.*)", (EXAMPLE / "finetune.yaml").read_text(), re.MULTILINE):
        for asked in ("--chat", f"--prompt '{PROMPT}'") if "ASK" in line else ("",):
            words = shlex.split(line.replace("ASK", f"{asked} --temperature 0"))
            program = ["-m", "rollcall"] if words[0] == "rollcall" else []
            done = subprocess.run(
                [sys.executable, *program, *words[1:], *["device=cpu"] * ("train" in words)],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                input="What is the capital of Peru?\nName the capital of Japan.\n",
                text=True,
                capture_output=True,
                timeout=500,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            said += done.stdout
    assert said.count(f"{PROMPT} Lima.\n") == 2
    assert said.count("\nLima.\nTokyo.\n") + said.count("Lima.\n\nTokyo.\n") >= 1
    assert said.endswith("Lima.\n")  # as plain transformers says
