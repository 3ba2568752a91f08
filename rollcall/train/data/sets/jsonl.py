"""Prompts and answers, or conversations, one JSON object a line; only the answers are targets."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from rollcall.config.arguments import check_tokenizer
from rollcall.config.schema import ConfigError, Data
from rollcall.train.data import files
from rollcall.train.data.source import Source, data_set
from rollcall.train.data.tokenizer import load
from rollcall.train.numerics.cross_entropy import IGNORED
from rollcall.train.ranks.world import World

HELD_OUT = 20
"""Without data.args.validation, one line of this many is for validation."""
Line = tuple[str, bytes]
"""The place of a line, file:number, and its content."""


@data_set(
    reader=lambda config, _: lambda paths: _rows(_lines(paths), **config.args),
    slow_imports=("transformers",),
)
def jsonl(
    config: Data, world: World, tokenizer: str = "", validation: str | None = None,
    prompt: str = "prompt", answer: str = "answer", max_length: int | None = None,
) -> Source:  # fmt: skip
    """Load the files that `data.path` names; the targets are the tokens of the answers.

    Args:
        config: the section data.
        world: the ranks; rank 0 checks all lines.
        tokenizer: the folder of the tokenizer; by default model.init or model.args.base.
        validation: the files to validate on; by default every 20th line of `data.path`.
        prompt: the key of the prompt.
        answer: the key of the answer.
        max_length: cut rows after this number of tokens.
    """
    lines = _lines(files.find(config.path or ""))
    held_out = lines[HELD_OUT - 1 :: HELD_OUT]
    if validation is None:
        lines = [line for number, line in enumerate(lines, 1) if number % HELD_OUT]
    else:
        held_out = _lines(files.find(validation, "data.args.validation"))
    make = partial(_rows, tokenizer=tokenizer, prompt=prompt, answer=answer, max_length=max_length)
    rows = make(lines)
    with world.together():
        for line in [*lines, *held_out] if world.is_main else ():
            if messages := rows.parsed(*line).get("messages"):
                rows.rendered(line[0], messages)
    return Source(rows, make(held_out), classes=len(rows.tokenizer), is_shifted=True)


@dataclass(frozen=True)
class Rows(Dataset[dict[str, list[int]]]):
    """The rows of lines: `input_ids`, and as `labels` the next tokens, if they are an answer's."""

    lines: Sequence[Line]
    tokenizer: Any
    keys: tuple[str, str]  # of the prompt and the answer
    most: int | None  # tokens of a row

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens, labels = list[int](), list[int]()
        for part, is_answer in self._parts(*self.lines[index]):
            tokens += part
            labels += part if is_answer else [IGNORED] * len(part)
        return {"input_ids": tokens[:-1][: self.most], "labels": labels[1:][: self.most]}

    def parsed(self, where: str, line: bytes) -> Mapping[str, Any]:
        """Return the object in a line; ConfigError if it has another form."""
        row: Any = None
        try:
            row = json.loads(line)
            messages = row.get("messages") or ()
            roles = [turn["role"] for turn in messages if turn["content"] is not None]
            if messages:
                is_right = "assistant" in roles
            else:
                is_right = all(isinstance(row[key], str) for key in self.keys)
                is_right = is_right and row[self.keys[1]] != ""
            reason = "" if is_right else ": other values"
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            reason = f": {type(error).__name__}: {error}"
        if reason:
            raise ConfigError(
                f"{where}: expected a JSON object with texts under {' and '.join(self.keys)} "
                "(data.args.prompt and data.args.answer name other keys), or with messages, a list "
                f"of objects with role and content, one of them with the role assistant{reason}"
            )
        if messages and not self.tokenizer.chat_template:
            folder = self.tokenizer.name_or_path
            raise ConfigError(
                f"{where}: messages need a chat template, but the tokenizer in {folder} has none; "
                f"use {' and '.join(self.keys)}"
            )
        return row  # type: ignore[no-any-return]

    def _parts(self, where: str, line: bytes) -> list[tuple[list[int], bool]]:
        """Return the tokens of a line in parts, each with whether it is an answer."""
        row, encode = self.parsed(where, line), self.tokenizer
        if not row.get("messages"):
            prompt, answer = (row[key] for key in self.keys)
            end = [encode.eos_token_id] if encode.eos_token_id is not None else []
            tokens = encode(answer, add_special_tokens=False)["input_ids"] + end
            return [(encode(prompt)["input_ids"], False), (tokens, True)]
        parts = self.rendered(where, row["messages"])
        return [
            (encode(text, add_special_tokens=False)["input_ids"], is_answer)
            for text, is_answer in parts
        ]

    def rendered(self, where: str, messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]]:
        """Return the text in parts, each with whether it is an answer; or raise ConfigError."""
        render, pairs = self.tokenizer.apply_chat_template, list[tuple[str, str]]()
        try:
            for number in (n for n, turn in enumerate(messages) if turn["role"] == "assistant"):
                # A conversation may begin with an answer; no template writes an empty one.
                before, asked = messages[:number], ""
                if before:
                    asked = render(before, tokenize=False, add_generation_prompt=True)
                pairs.append((asked, render(messages[: number + 1], tokenize=False)))
        except Exception as error:  # a template raises what it likes
            problem = f"the chat template refuses the messages: {error}"
            raise ConfigError(f"{where}: {problem}") from error
        parts, text = list[tuple[str, bool]](), ""
        for asked, whole in pairs:
            if not (asked.startswith(text) and whole.startswith(asked)):
                raise ConfigError(
                    f"{where}: the chat template changes a message when others follow it; give "
                    "every answer a separate line, as its last message"
                )
            parts += [(asked[len(text) :], False), (whole[len(asked) :], True)]
            text = whole
        return parts


def _rows(
    lines: Sequence[Line],
    tokenizer: str,
    prompt: str,
    answer: str,
    max_length: int | None,
    **_: Any,
) -> Rows:
    check_tokenizer(tokenizer)
    return Rows(lines, load(tokenizer, "data.args.tokenizer"), (prompt, answer), max_length)


def _lines(paths: Sequence[Path]) -> list[Line]:
    return [
        (f"{path}:{number}", line)
        for path in paths
        for number, line in enumerate(files.read(path).split(b"\n"), 1)
        if line.strip()
    ]
