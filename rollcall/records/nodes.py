"""Reports of a user's jobs about the nodes of a cluster, kept across jobs. No torch."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rollcall.records.run import Line

KEPT = 7 * 24 * 3600.0
"""Seconds after which a report no longer counts: by then, the node has usually been repaired."""


@dataclass(frozen=True)
class NodeReport(Line):
    """The failure of a host, or the user's word that its reports no longer count."""

    FILE = "nodes.jsonl"

    time: float  # seconds since 1970
    cluster: str  # its name in Slurm; empty without Slurm
    host: str
    reason: str  # in words; empty to forget the earlier reports
    run: str = ""  # the run directory of the job

    @classmethod
    def folder(cls) -> Path:
        """Return the folder of the file: in the user's home, which all jobs of the user see."""
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return Path(state) / "rollcall"

    @classmethod
    def current(cls, cluster: str | None = None) -> list[Self]:
        """Return the reports that count, of one cluster or of all; the oldest first."""
        kept: list[Self] = []
        for new in cls.read(cls.folder()):
            if not new.reason:
                kept = [old for old in kept if (old.cluster, old.host) != (new.cluster, new.host)]
            elif abs(time.time() - new.time) < KEPT and cluster in (None, new.cluster):
                kept.append(new)
        return kept

    def keep(self) -> None:
        """Append the report to the user's file."""
        self.folder().mkdir(parents=True, exist_ok=True)
        self.append(self.folder())
