"""Split a shell script into commands, with just enough of the shell's grammar to do so."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_OPERATOR = re.compile(r"&&|\|\||;;&|;;|;&|\|&|[&|;()\n]")
_REDIRECTION = re.compile(r"\d*(<<<|<<-|<<|>>|<>|<&|>&|>\||&>>|&>|<|>)(?!\()")
_ORDINARY = re.compile(r"[\w./:,=+@%^~-]+")  # read at once: a script is long

DEEPEST = 100
"""Levels of nested quotes and brackets that are read."""


class UnbalancedError(ValueError):
    """A quote, bracket or brace that is not closed; `line` is its line."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line}: a quote or bracket is not closed")
        self.line = line


@dataclass(frozen=True)
class Word:
    """A word of a command as written, with its quotes."""

    raw: str
    line: int


@dataclass(frozen=True)
class Command:
    """A simple command, and the operator after it: `|`, `&`, `;`, a line break, ...

    The brackets of a subshell are commands too: `(`, and `)` with the operator after it.
    A here-document (`<<END`) is a command without words that spans `lines` lines; `filled_in` is
    the part of its text in which this shell expands variables.
    """

    line: int
    words: tuple[Word, ...]
    end: str
    lines: int = 1
    filled_in: str = ""


def commands(text: str, line: int = 1) -> Iterator[Command]:
    """Yield the simple commands of a script; raise UnbalancedError at what is not closed."""
    words: list[Word] = []
    documents: list[str] = []
    position, has_closed = 0, False
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
            if not words and (has_closed or operator[0] == "("):
                words = [Word(")" if has_closed else "(", here)]
            if words:
                yield Command(words[0].line, tuple(words), operator[0])
                words = []
            has_closed = operator[0] == ")"
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
    """Return the text of a word without its quotes; `$(a command)` in it loses its spaces."""
    result = ""
    for piece in _pieces(raw, quoted):
        if piece[0] == "'" and not quoted:
            result += piece[1:-1]
        elif piece[0] == '"' and not quoted:
            result += plain(piece[1:-1], quoted=True)
        elif piece[0] == "\\" and (not quoted or piece[1:] in ('"', "\\", "$", "`", "\n")):
            result += piece[1:].strip("\n")
        else:
            result += "".join(piece.split()) if piece.startswith("$(") else piece
    return result


def expanded(raw: str, quoted: bool = False) -> str:
    """Return the parts of a word in which this shell, not a later one, expands variables."""
    result = ""
    for piece in _pieces(raw, quoted):
        if piece[0] == '"' and not quoted:
            result += expanded(piece[1:-1], quoted=True)
        elif piece.startswith("$("):
            result += f"$({_expanded_commands(piece[2:-1])})"
        elif piece[0] != "\\" and (piece[0] != "'" or quoted):
            result += piece
    return result


def _expanded_commands(text: str) -> str:
    """Return the same of the commands in `$(...)`, which may have here-documents."""
    try:
        inner = list(commands(text)) if "<<" in text else []
    except UnbalancedError:
        inner = []
    if not inner:
        return expanded(text)
    words = (expanded(word.raw) for command in inner for word in command.words)
    return " ".join([*words, *(command.filled_in for command in inner)])


def _pieces(raw: str, quoted: bool) -> Iterator[str]:
    """Yield the pieces of a word; what is not balanced comes as single characters."""
    position = 0
    while position < len(raw):
        ordinary = _ORDINARY.match(raw, position)
        try:
            end = ordinary.end() if ordinary else _skip(raw, position, 1, quoted)
        except UnbalancedError:
            end = position + 1
        yield raw[position:end]
        position = end


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
        if ordinary := _ORDINARY.match(text, position):
            position = ordinary.end()
        elif char == "(":
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


def _skip(text: str, position: int, line: int, quoted: bool = False, depth: int = 0) -> int:
    """Return the position after one character, or after the quotes or brackets that start there."""
    if depth > DEEPEST:
        raise UnbalancedError(line + text.count("\n", 0, position))
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
        return _closing(text, position + 1, line, depth + 1)
    if char == "`" or (char == '"' and not quoted):
        end = position + 1
        while end < len(text):
            if text[end] == char:
                return end + 1
            ordinary = _ORDINARY.match(text, end)
            end = ordinary.end() if ordinary else _skip(text, end, line, True, depth + 1)
        raise UnbalancedError(line + text.count("\n", 0, position))
    return position + 1


def _closing(text: str, position: int, line: int, depth: int = 0) -> int:
    """Return the position after the bracket or brace that closes the one here."""
    opening = text[position]
    partner, start, level = {"(": ")", "{": "}"}[opening], position, 0
    is_arithmetic = text.startswith("((", position)
    while position < len(text):
        char = text[position]
        if opening == "(" and char == "#" and text[position - 1].isspace() and not is_arithmetic:
            position = _end_of_line(text, position)
            continue
        if char in (opening, partner):
            level += 1 if char == opening else -1
            position += 1
            if level == 0:
                return position
        else:
            ordinary = _ORDINARY.match(text, position)
            position = ordinary.end() if ordinary else _skip(text, position, line, depth=depth)
    raise UnbalancedError(line + text.count("\n", 0, start))
