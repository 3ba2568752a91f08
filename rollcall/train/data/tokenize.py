"""`rollcall tokenize`: write text as the token files that `data.name=tokens` reads.

A .jsonl file has a document in each line, any other file is one document; both may end in .gz. An
end-of-text token follows each document.
"""

import argparse
import gzip
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rollcall.cli.parser import parser as command_parser
from rollcall.config import ConfigError
from rollcall.messages.refusal import refuse
from rollcall.system.files import write_atomic
from rollcall.train.data import files
from rollcall.train.data.tokenizer import load, refused

FACTS = "tokens.json"
TYPES: dict[str, np.dtype[Any]] = {".bin": np.dtype("<u2"), ".u32": np.dtype("<u4")}
"""The form of tokens by the suffix of their file; nanoGPT writes 16 bits."""
AT_ONCE = 2**20
"""Characters that the tokenizer gets at once, divided among its threads."""
SECONDS = 10.0
"""Seconds between two lines about the progress."""


def main(words: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    parser = command_parser("tokenize", __doc__.partition(": ")[2] if __doc__ else None)
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="files, directories or patterns")
    add("--tokenizer", required=True, metavar="FOLDER", help="tokenizer of transformers")
    add("--output", required=True, type=Path, metavar="DIR", help="where train.bin and val.bin go")
    add("--key", default="text", help="key of the text in a .jsonl file (default: text)")
    part = "share of the documents for validation (default: 0.01)"
    add("--validation", type=float, default=0.01, metavar="SHARE", help=part)
    options = parser.parse_args(words)
    try:
        print(_write(options))
    except ConfigError as error:
        return refuse(error)
    except OSError as error:
        return refuse(f"{error.filename or options.output}: {error.strerror}")
    return 0


def _write(options: argparse.Namespace) -> str:
    if not 0 < options.validation < 1:
        raise ConfigError(f"--validation: expected a share below 1, got {options.validation}")
    paths = [path for name in options.files for path in files.find(name, "FILE")]
    for present in options.output.glob("train.*"):
        raise ConfigError(f"{present} is there already: remove it, or choose another --output")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = load(options.tokenizer, "--tokenizer")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"--tokenizer={options.tokenizer} has no end-of-text token (eos_token)")
    options.output.mkdir(parents=True, exist_ok=True)
    size = max(len(tokenizer), *(number + 1 for number in tokenizer.get_vocab().values()))
    suffix = ".bin" if size <= 2**16 else ".u32"
    kind, names = TYPES[suffix], [options.output / f"{name}{suffix}" for name in ("train", "val")]
    parts = [path.with_suffix(".part") for path in names]
    try:
        with parts[0].open("w+b") as train, parts[1].open("wb") as validation:
            documents = _encode(options, tokenizer, paths, kind, train, validation)
            if not validation.tell():  # too few documents to leave one out: the last tokens
                count = int(train.tell() // kind.itemsize * (1 - options.validation))
                train.seek(count * kind.itemsize)
                validation.write(train.read())
                train.truncate(count * kind.itemsize)
            counts = [file.seek(0, os.SEEK_END) // kind.itemsize for file in (train, validation)]
            for file in (train, validation):
                file.flush()
                os.fsync(file.fileno())
        tokenizer.save_pretrained(options.output)  # `rollcall generate` reads it from there
        facts = {"vocabulary": size, "documents": documents}
        write_atomic(options.output / FACTS, json.dumps(facts))
        for part, path in zip(reversed(parts), reversed(names), strict=True):
            part.replace(path)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    sizes = (f"{count:,} tokens in {path}" for count, path in zip(counts, names, strict=True))
    return f"{documents:,} documents: {' and '.join(sizes)} (vocabulary of {size:,})"


def _encode(
    options: argparse.Namespace,
    tokenizer: Any,
    paths: Sequence[Path],
    kind: np.dtype[Any],
    train: BinaryIO,
    validation: BinaryIO,
) -> int:
    begin = shown = time.monotonic()
    count, end = 0, np.array([tokenizer.eos_token_id], kind)
    for texts in _batches(_documents(paths, options.key)):
        with refused(f"--tokenizer={options.tokenizer}"):
            # Text that looks like a special token is text.
            rows = tokenizer(texts, add_special_tokens=False, split_special_tokens=True)
        for row in rows["input_ids"]:
            is_held = int((count + 1) * options.validation) > int(count * options.validation)
            file = validation if is_held else train
            file.write(np.array(row, kind).tobytes() + end.tobytes())
            count += 1
        if time.monotonic() - shown > SECONDS:
            shown = time.monotonic()
            tokens = (train.tell() + validation.tell()) // kind.itemsize
            print(f"{count:,} documents, {tokens / (shown - begin):,.0f} tokens/s", file=sys.stderr)
    if not count:
        raise ConfigError(f"{', '.join(options.files)}: no document has any text")
    return count


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    for first in texts:
        batch, size = [first], len(first)
        while size < AT_ONCE and (more := next(texts, "")):
            batch.append(more)
            size += len(more)
        yield batch


def _documents(paths: Sequence[Path], key: str) -> Iterator[str]:
    """Yield the texts of the files; ConfigError names the file and line of a bad one."""
    for path in paths:
        name, opened = path.name.lower(), gzip.open if path.suffix == ".gz" else open
        is_lines, number = name.removesuffix(".gz").endswith(".jsonl"), 1
        wanted = f'an object with the text under "{key}"' if is_lines else "UTF-8"
        try:
            with opened(path, "rt", encoding="utf-8") as file:
                lines = file if is_lines else [file.read()]
                for number, line in enumerate(lines, 1):  # noqa: B007
                    text = json.loads(line)[key] if is_lines and line.strip() else line
                    if text.strip():
                        text.encode()  # no tokenizer takes half of a surrogate pair
                        yield text
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ConfigError(f"{path}: expected a whole gzip file ({error})") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{path}:{number}: expected {wanted} ({problem})") from error
