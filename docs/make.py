"""Make docs/reference.md, the table of docs/doctor.md and the pictures in docs/images.

They come from the code and from the text below.

    ./env/run python docs/make.py

Run it with Python 3.11 or 3.12: argparse of 3.13 prints options differently. A test fails when what
lies in docs is not what this script makes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from rollcall.commands import COMMANDS  # noqa: E402
from rollcall.config import describe  # noqa: E402
from rollcall.launch.doctor.checkup import checks  # noqa: E402
from rollcall.text import markdown  # noqa: E402

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
            ("train/: the step, the strategies,", "checkpoints, health, recovery"),
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
    parts.append(_text(530, 518, "rollcall/ defines each of them once.", "small"))
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
        rows.append((name, each.what, each.why, each.cure, each.source))
    count = sum(each.is_quick for each in checks().values())
    how = (
        f"{len(checks())} checks, of which {count} are quick. `docs/make.py` makes this table from"
    )
    return "\n".join(
        [text, "## All checks", "", how, "`launch/doctor/table.md`.", "", *markdown(rows), ""]
    )


def _help(name: str) -> str:
    command = [sys.executable, "-m", "rollcall", name, "--help"]
    env = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    answer = subprocess.run(
        command, cwd=DOCS.parent, env=env, capture_output=True, text=True, check=True
    )
    return answer.stdout.strip()


def pages() -> dict[Path, str]:
    """Return the files that this script makes, with their text."""
    return {
        DOCS / "images" / "architecture.svg": architecture(),
        DOCS / "images" / "run-life.svg": run_life(),
        DOCS / "reference.md": reference(),
        DOCS / "doctor.md": doctor(),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
