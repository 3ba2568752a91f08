"""The page of `rollcall accept` and of tests/gpu: what passed, failed or does not apply."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from rollcall.records.files import write_atomic
from rollcall.records.run import Line
from rollcall.text import duration, markdown


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
        """Whether a check failed or did not end, or none ran."""
        return not self.rows or any(row.state in ("failed", "began") for row in self.rows)

    def markdown(self) -> str:
        """Return the page as Markdown whose tables a terminal shows well, too."""
        states = [row.state for row in self.rows]
        counts = ", ".join(f"{states.count(it)} {it}" for it in sorted({*states}))
        total = duration(sum(row.seconds for row in self.rows))
        cells = [(row.check, row.state, duration(row.seconds), row.text) for row in self.rows]
        verdict = "FAILED" if self.failed else "Passed" if "passed" in states else "Nothing passed"
        lines = [f"# {self.title}", "", f"{verdict}: {counts}; {total}."]
        lines += ["", *markdown([("fact", ""), *self.facts.items()], wide=True), ""]
        found = markdown([("check", "result", "time", "found"), *cells], wide=True)
        return "\n".join([*lines, *found, ""])

    def write(self, place: Path) -> None:
        """Write the page to `place`.md and `place`.json."""
        write_atomic(Path(f"{place}.md"), self.markdown())
        write_atomic(Path(f"{place}.json"), json.dumps(asdict(self), indent=1) + "\n")


def read(folder: Path, title: str) -> Page:
    """Read what was recorded; a check that did not end has the state `began`."""
    facts = {name: value for line in Facts.read(folder) for name, value in line.facts.items()}
    rows = {row.check: row for row in Row.read(folder)}
    return Page(title, facts, [*rows.values()])
