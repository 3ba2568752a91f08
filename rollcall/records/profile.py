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
class Profile(Whole):
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
    operators: list[dict[str, Any]]  # name, calls, seconds of all steps; the longest first
    collectives: list[dict[str, Any]]  # name, calls, bytes of a call, seconds of all calls
    files: list[str] = field(default_factory=list)  # beside this file

    def lines(self, directory: Path) -> list[str]:
        """Return tables to print, for the run in this directory."""
        place = self.place(directory, **vars(self)).parent
        own = ", ".join(f"{name} {1000 * each:.2f}" for name, each in self.phases.items())
        steps = f"steps {self.first} to {self.last}"
        rows = [
            f"rank {self.rank}, {steps}: {1000 * self.seconds:.2f} ms per step",
            f"  ms by phase: {own}",
            f"  communication that nothing hid: {1000 * self.exposed:.2f} ms per step, "
            f"{self.exposed_by}",
            f"  {'operator':44} {'calls':>7} {'ms':>10}",
        ]
        for one in self.operators[: self.TOP]:
            rows.append(f"  {one['name'][:44]:44} {one['calls']:7} {1000 * one['seconds']:10.2f}")
        if self.collectives:
            rows.append(f"  {'collective':24} {'bytes':>12} {'calls':>6} {'ms':>10} {'GB/s':>8}")
        for one in self.collectives[: self.TOP]:
            rate = one["bytes"] * one["calls"] / max(one["seconds"], 1e-9) / 1e9
            rows.append(
                f"  {one['name'][:24]:24} {one['bytes']:12,} {one['calls']:6} "
                f"{1000 * one['seconds']:10.2f} {rate:8.3f}"
            )
        return [*rows, f"  files in {place}: {', '.join(self.files)}"]
