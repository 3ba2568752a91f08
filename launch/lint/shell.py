"""Which commands does a shell script have? As much of its grammar as telling them apart takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_OPERATOR = re.compile(r"&&|\|\||;;&|;;|;&|\|&|[&|;()\n]")
_REDIRECTION = re.compile(r"\d*(<<<|<<-|<<|>>|<>|<&|>&|>\||&>>|&>|<|>)(?!\()")


class UnbalancedError(ValueError):
    """A quote, bracket or brace without its partner; `line` is where it stands."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line}: a quote or bracket has no partner")
        self.line = line


@dataclass(frozen=True)
class Word:
    """A word of a command as it is written, quotes and all."""

    raw: str
    line: int


@dataclass(frozen=True)
class Command:
    """A simple command, and the operator behind it: `|`, `&`, `;`, a line break, ...

    A document (`<<END`) counts as a command without words, of so many `lines`; `filled_in` is the
    text in which this shell fills variables in.
    """

    line: int
    words: tuple[Word, ...]
    end: str
    lines: int = 1
    filled_in: str = ""


def commands(text: str, line: int = 1) -> Iterator[Command]:
    """The simple commands of a shell script, without comments, redirections and documents.

    Raises:
        UnbalancedError: a quote or bracket has no partner.
    """
    words: list[Word] = []
    documents: list[str] = []
    position = 0
    while position < len(text):
        here = line + text.count("\n", 0, position)
        redirection = _REDIRECTION.match(text, position)
        operator = _OPERATOR.match(text, position)
        if text.startswith("\\\n", position):
            position += 2
        elif text[position] in " \t\r":
            position += 1
        elif text[position] == "#":
            position = _end_of_line(text, position)
        elif text.startswith("((", position):
            position = _closing(text, position, line)
        elif redirection:
            start = redirection.end()
            while text[start : start + 1] in (" ", "\t"):
                start += 1
            position = _word_end(text, start, line)
            if redirection[1] in ("<<", "<<-"):
                documents.append(text[start:position])
        elif operator:
            if words:
                yield Command(words[0].line, tuple(words), operator[0])
                words = []
            position = operator.end()
            while documents and operator[0] == "\n":
                delimiter = documents.pop(0)
                body, position = _document(text, position, plain(delimiter))
                here += 1
                filled_in = expanded(body, quoted=True) if plain(delimiter) == delimiter else ""
                yield Command(here, (), "\n", body.count("\n"), filled_in)
                here += body.count("\n")
        else:
            end = _word_end(text, position, line)
            words.append(Word(text[position:end], here))
            position = end
    if words:
        yield Command(words[0].line, tuple(words), "\n")


def plain(raw: str, quoted: bool = False) -> str:
    """The text of a word without its quotes; `$(a command)` in it becomes one word."""
    result, position = "", 0
    while position < len(raw):
        end = _skip(raw, position, 1, quoted)
        piece = raw[position:end]
        if piece[0] == "'" and not quoted:
            result += piece[1:-1]
        elif piece[0] == '"' and not quoted:
            result += plain(piece[1:-1], quoted=True)
        elif piece[0] == "\\" and (not quoted or piece[1:] in ('"', "\\", "$", "`", "\n")):
            result += piece[1:].strip("\n")
        else:
            result += "".join(piece.split()) if piece.startswith("$(") else piece
        position = end
    return result


def expanded(raw: str, quoted: bool = False) -> str:
    """The parts of a word in which this shell, and no other one, fills variables in."""
    result, position = "", 0
    while position < len(raw):
        end = _skip(raw, position, 1, quoted)
        piece = raw[position:end]
        if piece[0] == '"' and not quoted:
            result += expanded(piece[1:-1], quoted=True)
        elif piece.startswith("$("):
            result += f"$({expanded(piece[2:-1])})"
        elif piece[0] != "\\" and (piece[0] != "'" or quoted):
            result += piece
        position = end
    return result


def _document(text: str, position: int, delimiter: str) -> tuple[str, int]:
    start = position
    while position < len(text):
        end = _end_of_line(text, position)
        if text[position:end].strip("\t") == delimiter:
            return text[start:position], min(end + 1, len(text))
        position = end + 1
    return text[start:], len(text)


def _end_of_line(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _word_end(text: str, position: int, line: int) -> int:
    start = position
    while position < len(text):
        char, following = text[position], text[position + 1 : position + 2]
        if char == "(":
            if not re.search(r"[=@?*+!]$", text[start:position]):  # an array, an extended pattern
                break
            position = _closing(text, position, line)
        elif char in "<>" and following == "(":
            position = _closing(text, position + 1, line)
        elif char in " \t\r\n;&|<>)":
            break
        else:
            position = _skip(text, position, line)
    return position


def _skip(text: str, position: int, line: int, quoted: bool = False) -> int:
    """The position behind one character, or behind the quotes or brackets that begin there."""
    char, following = text[position], text[position + 1 : position + 2]
    if char == "\\":
        return min(position + 2, len(text))
    if char == "'" and not quoted:
        end = text.find("'", position + 1)
        if end < 0:
            raise UnbalancedError(line + text.count("\n", 0, position))
        return end + 1
    if char == "$" and following == "'" and not quoted:
        position += 1
        while text[position + 1 : position + 2] not in ("'", ""):
            position += 2 if text[position + 1] == "\\" else 1
        return position + 2
    if char == "$" and following in ("(", "{"):
        return _closing(text, position + 1, line)
    if char == "`" or (char == '"' and not quoted):
        end = position + 1
        while end < len(text):
            if text[end] == char:
                return end + 1
            end = _skip(text, end, line, quoted=True)
        raise UnbalancedError(line + text.count("\n", 0, position))
    return position + 1


def _closing(text: str, position: int, line: int) -> int:
    """The position behind the bracket or brace that closes the one here."""
    opening = text[position]
    partner, start, depth = {"(": ")", "{": "}"}[opening], position, 0
    while position < len(text):
        char = text[position]
        if opening == "(" and char == "#" and text[position - 1].isspace():
            position = _end_of_line(text, position)
            continue
        if char in (opening, partner):
            depth += 1 if char == opening else -1
            position += 1
            if depth == 0:
                return position
        else:
            position = _skip(text, position, line)
    raise UnbalancedError(line + text.count("\n", 0, start))
