"""Make docs/reference.md, tables of four other pages, and pictures in docs/images.

They come from the code and from the text below.

    ./env/run python docs/make.py

It also writes the JSON schema of the configuration: this one command rebuilds all that is generated
after a change of a key, a command or its help, a data set or a model.

Run it with Python 3.11 or 3.12: argparse of 3.13 prints options differently. A test fails when what
lies in docs is not what this script makes.
"""

from __future__ import annotations

import ast
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import yaml

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "rollcall"
sys.path.insert(0, str(DOCS.parent))

from rollcall.cli.commands import COMMANDS  # noqa: E402
from rollcall.cli.program import main  # noqa: E402
from rollcall.config import describe, json_schema  # noqa: E402
from rollcall.launch.doctor.checkup import checks  # noqa: E402
from rollcall.launch.runs import reasons  # noqa: E402
from rollcall.launch.runs.decision import TABLE  # noqa: E402
from rollcall.messages.text import markdown  # noqa: E402

ROOMS = {
    "Keys and recipes": ("config",),
    "Submission": tuple(f"launch/{room}" for room in ("api", "program", "submission", "sweep")),
    "Nodes and ranks": ("launch", "system", "train/ranks"),
    "Data": ("train/data",),
    "Model, weights and loss": ("train/models", "train/numerics", "train/weights"),
    "Strategies": ("train/exact", "train/health", "train/parallel"),
    "Checkpoints": ("train/checkpoint",),
    "Prediction and generation": ("train/inference",),
    "Training": ("train",),
    "Tools": ("tools",),
}
"""Sections of troubleshooting.md, and the folders whose refusals they list; the first that fits."""
NO_REMEDY = re.compile(r"(expected|set|the largest is|the reports name) …|(got|it|kept|or) ")
"""Ends of refusals that give no advice without the values."""

STYLE = """
    text { font: 14px system-ui, sans-serif; fill: #1f2328; }
    .title { font-weight: 600; }
    .small { font-size: 12px; fill: #59636e; }
    .code { font-family: ui-monospace, monospace; font-size: 12.5px; }
    .middle { text-anchor: middle; }
    rect { fill: #f6f8fa; stroke: #8b949e; }
    rect.strong { fill: #ddf4ff; stroke: #0969da; }
    rect.good { fill: #dafbe1; stroke: #1a7f37; }
    rect.bad { fill: #ffebe9; stroke: #cf222e; }
    path { fill: none; stroke: #59636e; stroke-width: 1.5; }
    .head { fill: #59636e; stroke: none; }
    @media (prefers-color-scheme: dark) {
      text { fill: #f0f6fc; }
      .small { fill: #9198a1; }
      rect { fill: #151b23; stroke: #656c76; }
      rect.strong { fill: #121d2f; stroke: #4493f8; }
      rect.good { fill: #12261e; stroke: #3fb950; }
      rect.bad { fill: #25171c; stroke: #f85149; }
      path { stroke: #9198a1; }
      .head { fill: #9198a1; }
    }
"""


class Box(NamedTuple):
    """A rectangle with a title and lines of small text; x, y, width in pixels."""

    x: int
    y: int
    width: int
    title: str
    lines: tuple[str, ...] = ()
    kind: str = ""

    @property
    def height(self) -> int:
        """Pixels that the text needs."""
        return 34 + 18 * len(self.lines)

    def draw(self) -> Iterator[str]:
        """The elements of this box."""
        place = f'x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}"'
        yield f'<rect class="{self.kind}" {place} rx="6"/>'
        yield _text(self.x + 12, self.y + 22, self.title, "title")
        for number, line in enumerate(self.lines):
            yield _text(self.x + 12, self.y + 42 + 18 * number, line, "small")


def _text(x: int, y: int, words: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(words)}</text>'


def _arrow(points: Sequence[tuple[int, int]], words: str = "", at: tuple[int, int] = (0, 0)) -> str:
    line = " L ".join(f"{x} {y}" for x, y in points)
    label = _text(*at, words, "small") if words else ""
    return f'<path d="M {line}" marker-end="url(#head)"/>{label}'


def _picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    body = "\n  ".join(parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
  <title>{escape(title)}</title>
  <style>{STYLE}  </style>
  <defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"
    orient="auto-start-reverse"><path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>
  {body}
</svg>
"""


def architecture() -> str:
    """The rooms by the process that runs them, and the run directory between the halves."""
    boxes = [
        Box(20, 20, 250, "Login node", ("launch/submission: check, snapshot,", "render, submit")),
        Box(
            20,
            150,
            250,
            "First process of a job",
            ("launch/batch: start the step, choose", "hosts, requeue"),
        ),
        Box(
            20,
            280,
            250,
            "Supervisor, one per node",
            ("launch/node: rendezvous, heartbeat,", "attempts, takeover"),
        ),
        Box(
            20,
            410,
            250,
            "Parent of the ranks",
            ("launch/rank: import torch once,", "fork the ranks, wait for them"),
        ),
        Box(
            20,
            540,
            250,
            "Rank, one per GPU",
            ("train: the step, the strategies,", "checkpoints, health, recovery"),
            "strong",
        ),
        Box(
            530,
            20,
            250,
            "You",
            ("rollcall status, logs, why, cancel, …", "launch/commands and launch/runs"),
        ),
    ]
    directory = Box(
        530,
        280,
        250,
        "Run directory runs/<name>/",
        (
            "config.yaml: what you asked for",
            "code/: the snapshot of the code",
            "job/: script, attempts, heartbeats",
            "logs/: one file per rank",
            "metrics.jsonl, events.jsonl",
            "checkpoints/: whole or absent",
            "verdict.json: how it ended",
        ),
        "good",
    )
    parts = [line for box in [*boxes, directory] for line in box.draw()]
    starts = ("sbatch", "srun", "a fork server", "fork")
    for upper, lower, words in zip(boxes[:4], boxes[1:5], starts, strict=True):
        middle = upper.x + upper.width // 2
        parts.append(
            _arrow(
                [(middle, upper.y + upper.height), (middle, lower.y - 2)],
                words,
                (middle + 10, lower.y - 20),
            )
        )
    for box in boxes[:5]:
        y = box.y + box.height // 2
        target = min(max(y, directory.y + 20), directory.y + directory.height - 20)
        parts.append(_arrow([(box.x + box.width, y), (directory.x - 2, target)]))
    you = boxes[5]
    middle = you.x + you.width // 2
    parts.append(
        _arrow(
            [(middle, directory.y), (middle, you.y + you.height + 2)], "read", (middle + 10, 190)
        )
    )
    parts.append(_text(530, 500, "The halves share only these files.", "small"))
    parts.append(_text(530, 518, "rollcall/records defines each of them once.", "small"))
    return _picture(800, 640, "The rooms of rollcall and the processes that run them", parts)


def run_life() -> str:
    """One run from submission to its end, with what may happen on the way."""
    main = [
        Box(20, 30, 150, "submit", ("checks, snapshot,", "job script")),
        Box(210, 30, 150, "queued", ("rollcall status", "says why")),
        Box(400, 30, 150, "rendezvous", ("nodes meet in the", "run directory")),
        Box(590, 30, 150, "training", ("a checkpoint now", "and then"), "strong"),
        Box(780, 30, 150, "done", ("verdict, model,", "predict, generate"), "good"),
    ]
    events = [
        Box(210, 190, 150, "preempted", ("save, leave with 75,", "requeue")),
        Box(
            400,
            190,
            150,
            "rank or node lost",
            ("restart in the job, on", "a spare if needed"),
            "bad",
        ),
        Box(
            590, 190, 150, "bad step or hang", ("skip, roll back, or", "report and restart"), "bad"
        ),
        Box(780, 190, 150, "failed", ("rollcall why names", "the first cause"), "bad"),
    ]
    parts = [line for box in [*main, *events] for line in box.draw()]
    for left, right in pairwise(main):
        y = left.y + left.height // 2
        parts.append(_arrow([(left.x + left.width, y), (right.x - 2, y)]))
    top, bottom = 30 + main[0].height, 188
    parts += [
        _arrow([(620, top), (620, 145), (285, 145), (285, bottom)]),
        _arrow([(640, top), (640, 160), (475, 160), (475, bottom)]),
        _arrow([(680, top), (680, bottom)]),
        _arrow([(710, top), (710, 150), (855, 150), (855, bottom)]),
        _arrow([(250, 190), (250, top + 2)]),
        _arrow([(440, 190), (440, top + 2)]),
    ]
    parts.append(
        _text(
            20,
            300,
            "Every restart continues from the newest checkpoint that passes its checks.",
            "small",
        )
    )
    return _picture(950, 320, "The life of a run", parts)


def reference() -> str:
    """Every key and every command, from the schema and from the commands' own help."""
    lines = [
        "# Reference",
        "",
        "This page is generated by `docs/make.py` from the code.",
        "",
        "## Configuration keys",
        "",
        "Set a key on the command line as `key=value`, or in a recipe. `rollcall train --help KEY`",
        "explains one key.",
    ]
    section = None
    for key in describe():
        name, default = key.name, key.default
        first = name.partition(".")[0] if "." in name else ""
        if first != section:
            section = first
            title = f"`{first}`" if first else "Top level"
            lines += ["", f"### {title}", "", *markdown([("key", "type", "default", "meaning")])]
        shown = (
            ""
            if default is None
            else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        )
        lines.append(markdown([(f"`{name}`", key.type, shown, key.meaning)])[0])
    lines += ["", "## Commands", ""]
    people = [(name, command) for name, command in COMMANDS.items() if command.by_people]
    rows = [(f"[`rollcall {name}`](#rollcall-{name})", it.meaning) for name, it in people]
    lines += markdown([("command", "what it does"), *rows])
    for name, _ in people:
        if name == "train":
            lines += ["", "### rollcall train", "", "`rollcall train --help KEY` explains a key."]
        else:
            lines += ["", f"### rollcall {name}", "", "```text", _help(name), "```"]
    return "\n".join(lines) + "\n"


def doctor() -> str:
    """The page about the doctor, with the table of its checks as its last section."""
    text = (DOCS / "doctor.md").read_text().partition("\n## All checks\n")[0]
    rows = [("check", "what is checked", "why it matters", "what to do", "source")]
    for each in checks().values():
        name = f"`{each.name}`" + ("" if each.is_quick else " (slow)")
        rows.append((name, each.what, each.why, each.remedy, each.source))
    count = sum(each.is_quick for each in checks().values())
    how = (
        f"{len(checks())} checks, of which {count} are quick. `docs/make.py` makes this table from"
    )
    return "\n".join(
        [
            text,
            "## All checks",
            "",
            how,
            "`rollcall/launch/doctor/table.md`.",
            "",
            *markdown(rows),
            "",
        ]
    )


def reliability() -> str:
    """The page about failures, with the table by which rollcall decides what follows."""
    before, title, after = (DOCS / "reliability.md").read_text().partition("### The table\n")
    after = after[after.index("\n## ") :]
    rows = [("state", "event", "if", "action", "time to end", "next state")]
    for rule in TABLE:
        facts = " and ".join(rule.facts).replace("_", " ")
        grace = "" if rule.grace is None else f"{rule.grace:g} s"
        rows.append((rule.state, rule.event, facts, rule.action, grace, rule.next))
    return "\n".join([before + title, *markdown(rows), after])


def troubleshooting() -> str:
    """The page about messages: reasons of Slurm, signals, and the refusals in the code."""
    lines = [(DOCS / "troubleshooting.md").read_text().partition("\n## Why a job waits\n")[0]]
    lines += ["## Why a job waits", ""]
    lines += markdown([("reason that Slurm shows", "meaning"), *_coded(reasons.PENDING)])
    lines += ["", "## How Slurm ended a job", ""]
    lines += markdown([("state", "cause, and what to do"), *_coded(reasons.ENDED)])
    signals = {number.name: text for number, text in reasons.SIGNALS.items()}
    lines += ["", "## Signals that end a rank", ""]
    lines += markdown([("signal", "usual cause"), *_coded(signals)])
    lines += ["", "## Refusals", ""]
    lines += ["A value in a message is shown as `…`. Messages without a remedy are left out.", ""]
    paths = sorted(PACKAGE.rglob("*.py"))
    sources = {path: _Advised().visit(ast.parse(path.read_text())) for path in paths}
    kinds = _refusals(sources.values())
    rows: dict[str, dict[str, str]] = {title: {} for title in ROOMS}
    for path, tree in sources.items():
        room = path.relative_to(PACKAGE).as_posix()
        title = next((title for title, rooms in ROOMS.items() if room.startswith(rooms)), "Tools")
        for node in ast.walk(tree):
            problem, _, remedy = _message(node, kinds, path.name == "checks.py").rpartition("; ")
            if _says(problem, 12) and _says(remedy, 8) and not NO_REMEDY.match(remedy):
                rows[title][problem] = remedy
    for title, found in rows.items():
        table = markdown([("message", "what to do"), *_coded(found)])
        lines += [f"### {title}", "", *table, ""]
    return "\n".join(lines)


def _coded(rows: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for left, right in rows.items():
        yield f"`{left.replace('`', chr(39))}`", right


def _refusals(trees: Iterable[ast.AST]) -> set[str]:
    """Return the names of RefusedError and of its subclasses."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    kinds = {"RefusedError"}
    while new := {it.name for it in classes if kinds & {*map(_name, it.bases)}} - kinds:
        kinds |= new
    return kinds


class _Advised(ast.NodeTransformer):
    """Puts the text of a variable `advice` where a message has its name."""

    def __init__(self) -> None:
        self._text: ast.expr | None = None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Forget the text of another function."""
        self._text = None
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Remember the text."""
        if _name(node.targets[0]) == "advice":
            self._text = node.value
        return self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        """Forget the text if the name gets another value."""
        if node.target.id == "advice":
            self._text = None
        return self.generic_visit(node)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        """Replace the name."""
        return self._text if self._text and _name(node.value) == "advice" else node


def _message(node: ast.AST, kinds: set[str], has_rules: bool) -> str:
    """Return the text of a refusal that is raised, or of a rule: key, condition and reason."""
    match node:
        case ast.Raise(exc=ast.Call(func=kind, args=[text, *_])) if _name(kind) in kinds:
            return _shape(text)
        case ast.Tuple(elts=[key, _, reason]) if has_rules and _shape(key) and _shape(reason):
            return f"{_shape(key)} {_shape(reason)}"
    return ""


def _name(node: ast.AST) -> str:
    return str(getattr(node, "id", getattr(node, "attr", "")))


def _shape(node: ast.AST) -> str:
    """Return the text of an expression, with … for values; empty if it is not a text."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_shape(part) or "…" for part in node.values)
    return ""


def _says(text: str, letters: int) -> bool:
    return len(re.findall(r"[a-z]", text)) >= letters


def glossary() -> str:
    """The page about words of other frameworks, with the words that errors translate."""
    text = (DOCS / "glossary.md").read_text().partition("\n## All words that errors know\n")[0]
    words = yaml.safe_load((PACKAGE / "config" / "synonyms.yaml").read_text())
    keys, elsewhere = ([*words[part].items()] for part in ("keys", "elsewhere"))
    rows = [("their word", "here")]
    rows += [(_words(names), f"`{key}`") for names, key in keys]
    rows += [(_words(names), advice) for names, advice in elsewhere]
    of_values = [("their value", "of", "here")]
    for key, values in words["values"].items():
        of_values += [(_words(f"{names}"), f"`{key}`", text) for names, text in values.items()]
    return "\n".join(
        [
            text,
            "## All words that errors know",
            "",
            "`docs/make.py` makes these tables from `rollcall/config/synonyms.yaml`.",
            "",
            *markdown(rows),
            "",
            *markdown(of_values),
            "",
        ]
    )


def _words(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())


def _help(name: str) -> str:
    """Return what `rollcall NAME --help` prints, in this process: each import takes its time."""
    output, before = io.StringIO(), dict(os.environ)
    os.environ.update(COLUMNS="100", NO_COLOR="1")
    try:
        with redirect_stdout(output), suppress(SystemExit):
            main([name, "--help"])
    finally:
        os.environ.clear()
        os.environ.update(before)
    return output.getvalue().strip()


def pages() -> dict[Path, str]:
    """Return the files that this script makes, with their text."""
    return {
        DOCS.parent / "rollcall" / "config" / "recipes" / "schema.json": json_schema(),
        DOCS / "images" / "architecture.svg": architecture(),
        DOCS / "images" / "run-life.svg": run_life(),
        DOCS / "reference.md": reference(),
        DOCS / "doctor.md": doctor(),
        DOCS / "reliability.md": reliability(),
        DOCS / "troubleshooting.md": troubleshooting(),
        DOCS / "glossary.md": glossary(),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
