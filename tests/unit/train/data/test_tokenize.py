"""`rollcall tokenize`: text becomes token files, and bad text is named and leaves nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from rollcall.train.data.tokenize import main

TEXTS = [f"Line {number} of a text, and <|end|> as text." for number in range(250)]


def made(path: Path, more: int = 0) -> Path:
    """A tokenizer of bytes and some more tokens."""
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers")
    bytes_only = tokenizers.ByteLevelBPETokenizer()
    bytes_only.train_from_iterator(TEXTS, vocab_size=300, special_tokens=["<|end|>"])
    whole = library.PreTrainedTokenizerFast(
        tokenizer_object=bytes_only._tokenizer, eos_token="<|end|>"
    )
    whole.add_tokens([f"<more{number}>" for number in range(more)])
    whole.save_pretrained(path)
    return path


@pytest.mark.parametrize(("more", "suffix", "kind"), [(0, "bin", "<u2"), (70_000, "u32", "<u4")])
def test_documents_become_tokens_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: int, suffix: str, kind: str
) -> None:
    folder, output = made(tmp_path / "tokenizer", more), tmp_path / "tokens"
    with gzip.open(tmp_path / "first.jsonl.gz", "wt") as file:
        file.writelines(f"{json.dumps({'body': text})}\n\n" for text in TEXTS[:100])
    lines = (f"{json.dumps({'body': text})}\n" for text in TEXTS[100:-1])
    (tmp_path / "second.jsonl").write_text("".join(lines))
    (tmp_path / "third.txt").write_text(TEXTS[-1])
    names = [str(tmp_path / name) for name in ("first.jsonl.gz", "second.jsonl", "third.txt")]
    words = [*names, f"--tokenizer={folder}", f"--output={output}"]
    assert main([*words, "--key=body", "--validation=0.02"]) == 0
    assert capsys.readouterr().out.startswith("250 documents: ")
    library = pytest.importorskip("transformers")
    tokenizer = library.AutoTokenizer.from_pretrained(output)  # it lies beside the tokens
    for split, start in (("train", 0), ("val", 1)):
        expected = [text for n, text in enumerate(TEXTS) if ((n + 1) % 50 == 0) == start]
        tokens = np.fromfile(output / f"{split}.{suffix}", kind)
        ends = np.flatnonzero(tokens == tokenizer.eos_token_id)
        assert len(ends) == len(expected) and ends[-1] == len(tokens) - 1
        rows = np.split(tokens, ends + 1)[:-1]
        assert [tokenizer.decode(row[:-1].tolist()) for row in rows] == expected
    assert main([*words, "--key=body"]) == 2
    assert "is there already: remove it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "fine"}\n{"texts": 1}\n', ":2: expected an object with the text"),
        ("a.jsonl", b'{"text": 3}\n', ":1: expected an object with the text under"),
        ("a.txt", b"\xff\xfe", ":1: expected UTF-8"),
        ("a.txt", b" \n", "no document has any text"),
        ("b.txt", b"x", "no file matches"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}', ":2: expected an object with the text"),
        ("a.txt.gz", b"no gzip", "a.txt.gz: expected a whole gzip file"),
        (
            "a.jsonl.gz",
            gzip.compress(b"x" * 999, mtime=0)[:-9],
            "a.jsonl.gz: expected a whole gzip file",
        ),
        (
            "a.txt.gz",
            gzip.compress(b"", mtime=0)[:10] + b"\xff" * 9,
            "a.txt.gz: expected a whole gzip file",
        ),
    ],
)
def test_bad_text_is_named_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    files, folder, output = f"{tmp_path}/a.*", made(tmp_path / "tokenizer"), tmp_path / "tokens"
    assert main([files, f"--tokenizer={folder}", f"--output={output}"]) == 2
    assert message in capsys.readouterr().err
    assert not output.exists() or not [*output.iterdir()]


def test_numbers_of_tokens_may_have_gaps(tmp_path: Path) -> None:
    library, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"<|end|>": 0, "a": 2, "b": 70_000}, unk_token="a")
    words = tokenizers.Tokenizer(model)
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    whole = library.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|end|>")
    whole.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "A.JSONL").write_text('{"text": "a b"}\n' * 2)
    tokens = [f"--tokenizer={tmp_path}/tokenizer", f"--output={tmp_path}/tokens"]
    assert main([f"{tmp_path}/A.JSONL", *tokens, "--validation=0.5"]) == 0
    facts = json.loads((tmp_path / "tokens/tokens.json").read_text())
    assert facts == {"vocabulary": 70_001, "documents": 2}
    assert [*np.fromfile(tmp_path / "tokens/train.u32", "<u4")] == [2, 70_000, 0]


def test_one_long_document_is_cut_trained_on_and_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rollcall.train.inference.generate import main as generate
    from rollcall.train.main import main as train

    (tmp_path / "book").write_text("\n".join(TEXTS))
    folder, output = made(tmp_path / "tokenizer"), tmp_path / "tokens"
    words = [f"{tmp_path}/book", f"--tokenizer={folder}", f"--output={output}"]
    assert main([*words, "--validation=0.1"]) == 0
    held = (output / "val.bin").stat().st_size
    assert 0.099 < held / (held + (output / "train.bin").stat().st_size) < 0.101
    keys = ["model.hidden_size=16", "model.num_layers=1", "data.seq_len=32", "device=cpu"]
    keys += ["data.name=tokens", f"data.path={output}", "train.steps=2", "run.name=it"]
    assert train(["gpt", *keys, f"run.root={tmp_path}", "data.global_batch=4"]) == 0
    assert generate([str(tmp_path / "it"), "--prompt=Line 7", "--length=3"]) == 0
    assert "Line 7" in capsys.readouterr().out
