"""The prose of the project reads as plain English: few phrases that a translation would leave.

The list has markers, not rules. A page without any can still be hard to read; now and then a hit
is right, which is why a rate is tested.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 1.0
"""Markers per 1,000 words."""
PROSE = (".py", ".md", ".sbatch", ".sh", ".yaml")
MARKERS = re.compile(
    r"""
      \b(?:is|are|was|were)\ no\ (?!longer\b|more\b|need\b|way\b|one\b|point\b)[a-z]
    | \b(?:so|as|equally)\ (?:many|often|long\ a)\b
    | \b(?:that|those)\ of\b | \bthose\ (?:that|which)\b
    | (?:^|[.;:]\ )(?:Who|Whoever|Whom|What)
      \ (?!is|are|do|does|did|was|would|happens|must|can|may)[a-z]
    | \b(?:tells?|told|telling)\b
    | \b(?:anew|besides|afresh|befalls?|befell|shall|whence|beforehand|thereof|therein)\b
    | \b(?:stands?|stood)\ (?:in|on|there|beside|behind|under|for|together)\b
    | \b(?:is|are)\ there\b(?!\ (?:a|an|any|no|room))
    | \bof\ (?:its|their|his|her|one's|yours|the\ user's|a\ user's)\ own\b
    | \b(?:gets?\ on|goes\ on|go\ on|comes?\ about)\b
    | \b(?:mend|mended|cure|lacks?|lacking)\b
    | \bas\ (?:it|they)\ (?:stands?|is|are|was|were)\b
    | \b(?:whoever|whomever)\b
    """,
    re.VERBOSE,
)


def files() -> list[Path]:
    listed = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\n")
    paths = [ROOT / name for name in names if name.endswith(PROSE)]
    return [path for path in paths if path.is_file() and path != Path(__file__)]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that people read, with their numbers: docstrings, messages, comments, pages."""
    text = path.read_text()
    if path.suffix == ".md":
        yield from enumerate(text.splitlines(), 1)
    elif path.suffix != ".py":
        lines = enumerate(text.splitlines(), 1)
        yield from ((number, line) for number, line in lines if line.lstrip().startswith("#"))
    else:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                for number, line in enumerate(node.value.splitlines()):
                    yield node.lineno + number, line
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def test_the_prose_is_plain() -> None:
    words, hits = 0, []
    for path in files():
        for number, line in prose(path):
            words += len(line.split())
            place = f"{path.relative_to(ROOT)}:{number}"
            hits += [f"{place}: {match[0]}" for match in MARKERS.finditer(line)]
    rate = 1000 * len(hits) / words
    assert rate < MOST, f"{rate:.1f} markers per 1,000 words:\n" + "\n".join(hits)
