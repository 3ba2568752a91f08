"""The messages that docs/checks.md quotes are messages of the code."""

from __future__ import annotations

import ast
import re

import pytest
from checkout import ROOT

PAGE = re.sub(r"```.*?```", "", (ROOT / "docs" / "checks.md").read_text(), flags=re.DOTALL)
QUOTES = [
    " ".join(quote.split()).removeprefix("warning: ")
    for quote in re.findall(r"`([^`]+)`", PAGE)
    if len(quote.split()) > 3 and "/env/run" not in quote and ": sum" not in quote
]


@pytest.fixture(scope="module")
def messages() -> list[list[str]]:
    """The fixed texts of each message, between those that it fills in."""
    found = []
    for path in (ROOT / "rollcall/train").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [str(part.value) if isinstance(part, ast.Constant) else "\0" for part in parts]
            found.append("".join(texts).split("\0"))
    return [texts for texts in found if any(" " in text for text in texts)]


def said(texts: list[str], quote: str) -> int:
    """Return how much of a quote is fixed text of a message that begins with it."""
    first, *rest = texts
    if not (quote.startswith(first) or first.startswith(quote)):
        return 0
    total = end = min(len(first), len(quote))
    for text in rest:
        if (found := quote.find(text, end + 1)) < 0:  # the quote ends before or in this text
            ends = [size for size in range(len(text)) if quote.endswith(text[:size])]
            return total + max(ends, default=0)
        total, end = total + len(text), found + len(text)
    return total


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_is_one_of_the_code(quote: str, messages: list[list[str]]) -> None:
    assert max(said(texts, quote) for texts in messages) > len(quote) / 3
