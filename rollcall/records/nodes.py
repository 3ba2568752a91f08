"""Reports of a user's jobs about the nodes of a cluster, kept across jobs. No torch."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rollcall.records.files import write_atomic
from rollcall.records.run import Line

KEPT = 7 * 24 * 3600.0
"""Seconds after which a report no longer counts: by then, the node has usually been repaired."""
MOST = 2**20
"""Bytes of the file from which reports that no longer count are removed."""


@dataclass(frozen=True)
class NodeReport(Line):
    """A host failed, or the user says that its reports no longer count."""

    FILE = "nodes.jsonl"

    time: float  # seconds since 1970
    cluster: str  # Slurm's name of it; empty without Slurm
    host: str
    reason: str  # in words; empty to forget the reports before
    run: str = ""  # the run directory of the job

    @classmethod
    def folder(cls) -> Path:
        """Return where the file lies: in the user's home, which all jobs of the user see."""
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return Path(state) / "rollcall"

    @classmethod
    def current(cls, cluster: str | None = None) -> list[Self]:
        """Return the reports that count, of one cluster or of all; the oldest first."""
        kept: list[Self] = []
        for line in cls.read(cls.folder()):
            if not line.reason:
                kept = [it for it in kept if (it.cluster, it.host) != (line.cluster, line.host)]
            elif abs(time.time() - line.time) < KEPT and cluster in (None, line.cluster):
                kept.append(line)
        return kept

    def keep(self) -> None:
        """Append the report to the user's file."""
        self.folder().mkdir(parents=True, exist_ok=True)
        path = self.folder() / self.FILE
        if path.is_file() and path.stat().st_size > MOST:
            lines = (json.dumps(report.as_dict()) + "\n" for report in self.current())
            write_atomic(path, "".join(lines))
        self.append(self.folder())
