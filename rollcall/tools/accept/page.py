"""The page of `rollcall accept` and of tests/gpu: what passed, failed or does not apply."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from rollcall.messages.text import duration, markdown
from rollcall.records.run import Line
from rollcall.system.files import write_atomic


@dataclass(frozen=True)
class Row(Line):
    """A check, its time in seconds, and what it found, why it failed or why it does not apply.

    Rank 0 writes a line when a check begins and when it ends.
    """

    FILE = "accept.jsonl"

    check: str
    state: Literal["", "began", "passed", "failed", "not applicable"] = ""
    seconds: float = 0.0
    text: str = ""


@dataclass(frozen=True)
class Facts(Line):
    """Facts about the machine, from the ranks of an attempt, in the same file."""

    FILE = Row.FILE

    facts: dict[str, str]


@dataclass
class Page:
    """All results of one machine or allocation; `facts` are the machine and the versions."""

    title: str
    facts: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """True if a check failed or did not end, or none ran."""
        return not self.rows or any(row.state in ("failed", "began") for row in self.rows)

    def markdown(self) -> str:
        """Return the page as Markdown whose tables a terminal shows well, too."""
        states = [row.state for row in self.rows]
        counts = ", ".join(f"{states.count(state)} {state}" for state in sorted({*states}))
        total = duration(sum(row.seconds for row in self.rows))
        cells = [(row.check, row.state, duration(row.seconds), row.text) for row in self.rows]
        verdict = "FAILED" if self.failed else "Passed" if "passed" in states else "Nothing passed"
        lines = [f"# {self.title}", "", f"{verdict}: {counts}; {total}."]
        lines += ["", *markdown([("fact", ""), *self.facts.items()], wide=True), ""]
        results = markdown([("check", "result", "time", "found"), *cells], wide=True)
        return "\n".join([*lines, *results, ""])

    def write(self, path: Path) -> None:
        """Write the page to `path`.md and `path`.json."""
        write_atomic(Path(f"{path}.md"), self.markdown())
        write_atomic(Path(f"{path}.json"), json.dumps(asdict(self), indent=1) + "\n")


def read(folder: Path) -> Page:
    """Read what `rollcall accept` recorded; a check that did not end has the state `began`."""
    facts = {name: value for line in Facts.read(folder) for name, value in line.facts.items()}
    rows = {row.check: row for row in Row.read(folder)}
    return Page(f"rollcall accept, {time.strftime('%Y-%m-%d')}", facts, [*rows.values()])
