"""The prose of the project reads as plain English: few phrases that a translation would leave.

The list has markers, not rules. A page without any can still be hard to read; now and then a hit
is right, which is why a rate is tested.

Names and first lines have ceilings per folder, which only fall. This command lowers them:
`PYTHONPATH=tests/helpers ./env/run python tests/unit/test_english.py`.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import ROOT

MOST = 1.0
"""Markers per 1,000 words."""
NO_NOUNS = {"found", "one", "place", "placed", "places", "each", "own", "told", "it"}
"""Names that do not say what they hold."""
HEADLESS = re.compile(r"(What|Whether|Where|Why|Return (what|whether|where|why))\b")
"""First lines of docstrings that begin with neither a verb nor a noun."""
CEILINGS: dict[str, tuple[int, int, int]] = {
    "rollcall/launch/batch": (2, 0, 0),
    "rollcall/launch/program": (19, 7, 0),
    "rollcall/launch/runs": (3, 1, 2),
    "rollcall/launch/scheduler": (19, 4, 0),
    "rollcall/launch/submission": (56, 13, 0),
    "rollcall/records": (0, 1, 0),
    "rollcall/tools/accept": (1, 0, 0),
    "rollcall/tools/bench": (59, 0, 1),
    "rollcall/tools/plan": (3, 1, 0),
    "rollcall/tools/report": (1, 0, 0),
    "rollcall/train": (27, 0, 0),
    "rollcall/train/data": (0, 0, 1),
    "rollcall/train/exact": (3, 0, 0),
    "rollcall/train/numerics": (29, 3, 1),
    "rollcall/train/parallel": (29, 5, 3),
    "rollcall/train/ranks": (15, 0, 0),
    "rollcall/train/recovery": (21, 0, 1),
}
"""By folder: names that are no nouns, headless docstrings, texts or slices that depend on a bool.

A folder that is not listed has none.
"""
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


def names_of(tree: ast.AST) -> Iterator[str]:
    """The names that a file gives to variables, parameters, attributes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def docstrings(tree: ast.AST) -> Iterator[str]:
    """The docstrings of a file, those below a constant or a field included."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value


def depends_on_a_bool(node: ast.AST) -> bool:
    """A text, list or tuple that is multiplied by a bool, or a slice whose end is one."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        pairs = ((node.left, node.right), (node.right, node.left))
        return any(_is_sequence(text) and _is_bool(factor) for text, factor in pairs)
    ends = [node.lower, node.upper] if isinstance(node, ast.Slice) else []
    return any(_is_bool(part) for end in ends if end for part in ast.walk(end))


def _is_sequence(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text or isinstance(node, ast.JoinedStr | ast.List | ast.Tuple)


def _is_bool(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "bool"
    name = getattr(node, "id", getattr(node, "attr", ""))
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_not or isinstance(node, ast.Compare) or name.startswith(("is_", "has_"))


def counts() -> dict[str, tuple[int, int, int]]:
    """The numbers that CEILINGS limits, in the present state of the code."""
    names: Counter[str] = Counter()
    headless: Counter[str] = Counter()
    by_bool: Counter[str] = Counter()
    for path in files():
        folder = path.parent.relative_to(ROOT).as_posix()
        if path.suffix == ".py" and folder.split("/")[0] in ("rollcall", "env"):
            tree = ast.parse(path.read_text())
            names[folder] += sum(name.strip("_") in NO_NOUNS for name in names_of(tree))
            headless[folder] += sum(HEADLESS.match(text) is not None for text in docstrings(tree))
            by_bool[folder] += sum(map(depends_on_a_bool, ast.walk(tree)))
    return {folder: (names[folder], headless[folder], by_bool[folder]) for folder in sorted(names)}


def test_names_are_nouns_and_docstrings_have_a_head() -> None:
    above = {
        folder: f"{now}, allowed {CEILINGS.get(folder, (0, 0, 0))}"
        for folder, now in counts().items()
        if any(a > b for a, b in zip(now, CEILINGS.get(folder, (0, 0, 0)), strict=True))
    }
    assert above == {}, f"rename {sorted(NO_NOUNS)}; begin docstrings with a verb or a noun"


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ('text = "s" * (count != 1)', 1),
        ('text = f"; {early}" * bool(early)', 1),
        ('words = ["--local"] * is_local', 1),
        ("rest = words[words[:1] == [1] :]", 1),
        ('line = "-" * width', 0),
        ("rest = words[start + 1 :]", 0),
    ],
)
def test_a_text_by_a_bool_is_recognized(code: str, count: int) -> None:
    assert sum(map(depends_on_a_bool, ast.walk(ast.parse(code)))) == count


if __name__ == "__main__":
    text = Path(__file__).read_text()
    before, begin, rest = text.partition("CEILINGS: dict[str, tuple[int, int, int]] = {\n")
    lowered = {
        folder: tuple(map(min, now, CEILINGS.get(folder, (0, 0, 0))))
        for folder, now in counts().items()
    }
    rows = (f'    "{folder}": {least},\n' for folder, least in lowered.items() if any(least))
    Path(__file__).write_text(before + begin + "".join(rows) + rest[rest.index("}\n") :])
