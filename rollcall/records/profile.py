"""The request for a profile of a few steps, and its result. No torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rollcall.records.run import Whole


@dataclass(frozen=True)
class ProfileRequest(Whole):
    """A person asks a live run for a profile; the run removes the file when it has read it."""

    FILE = "profile/request.json"

    steps: int
    ranks: list[int]


@dataclass(frozen=True)
class RankProfile(Whole):
    """The profile of a rank in the steps from `first` to `last`; its trace lies beside the file."""

    FILE = "profile/steps-{first}-{last}/rank-{rank}.json"
    FOLDER: ClassVar = "profile"
    TOP: ClassVar = 12

    rank: int
    first: int
    last: int
    seconds: float  # of a step, mean; longer than without the profile
    phases: dict[str, float]  # mean seconds of a step
    exposed: float  # seconds of a step in which nothing hid the communication
    exposed_by: str  # how that was measured
    # Name, calls, own seconds in all steps, with those called (total), share of all own seconds.
    operators: list[dict[str, Any]]
    collectives: list[dict[str, Any]]  # name, calls, bytes of a call, seconds of all calls
    files: list[str] = field(default_factory=list)  # beside this file

    def lines(self, directory: Path) -> list[str]:
        """Return the lines to print, for the run in this directory."""
        folder = self.path_in(directory, **vars(self)).parent
        phases = ", ".join(f"{name} {1000 * seconds:.2f}" for name, seconds in self.phases.items())
        steps = self.last - self.first + 1
        per_step = 1000 / steps  # of seconds, ms of a step
        rows = [
            f"rank {self.rank}, steps {self.first} to {self.last}, means of a step: "
            f"{1000 * self.seconds:.2f} ms",
            f"  ms by phase: {phases}",
            f"  communication that nothing hid: {1000 * self.exposed:.2f} ms per step, "
            f"{self.exposed_by}",
            f"  {'operator':36} {'calls':>7} {'self ms':>9} {'self %':>7} {'total ms':>9}",
        ]
        for row in self.operators[: self.TOP]:
            name, total = row["name"], per_step * row.get("total", row["seconds"])
            name = name if len(name) <= 36 else f"{name[:20]}…{name[-15:]}"
            rows.append(
                f"  {name:36} {row['calls'] / steps:7.4g} {per_step * row['seconds']:9.2f} "
                f"{row.get('share', 0):7.1%} {total:9.2f}"
            )
        if self.collectives:  # they wait for the last rank too, and several may run at once
            head = f"{'bytes':>12} {'calls':>6} {'ms':>9} {'GB/s':>8}"
            rows.append(f"  {'collective, with waiting':24} {head}")
        for row in self.collectives[: self.TOP]:
            rate = row["bytes"] * row["calls"] / max(row["seconds"], 1e-9) / 1e9
            rows.append(
                f"  {row['name'][:24]:24} {row['bytes']:12,} {row['calls'] / steps:6.4g} "
                f"{per_step * row['seconds']:9.2f} {rate:8.3g}"
            )
        kinds = {
            "trace": "trace, for https://ui.perfetto.dev: ",
            "memory": "allocator, for https://pytorch.org/memory_viz: ",
        }
        return rows + [
            f"  {kinds.get(file.partition('-')[0], '')}{folder / file}" for file in self.files
        ]
