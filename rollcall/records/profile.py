"""The request for a profile of a few steps, and its result. No torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

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

    rank: int
    first: int
    last: int
    seconds: float  # of a step, mean; longer than without the profile
    phases: dict[str, float]  # mean seconds of a step
    exposed: float  # seconds of a step in which nothing hid the communication
    exposed_by: str  # how that was measured
    operators: str  # the table of torch's profiler, of all steps
    files: list[str] = field(default_factory=list)  # beside this file

    def lines(self, directory: Path) -> list[str]:
        """Return the lines to print, for the run in this directory."""
        folder = self.path_in(directory, **vars(self)).parent
        phases = ", ".join(f"{name} {1000 * seconds:.2f}" for name, seconds in self.phases.items())
        rows = [
            f"rank {self.rank}, steps {self.first} to {self.last}, means of a step: "
            f"{1000 * self.seconds:.2f} ms",
            f"  ms by phase: {phases}",
            f"  communication that nothing hid: {1000 * self.exposed:.2f} ms per step, "
            f"{self.exposed_by}",
            *self.operators.splitlines(),
        ]
        kinds = {
            "trace": "trace, for https://ui.perfetto.dev: ",
            "memory": "allocator, for https://pytorch.org/memory_viz: ",
        }
        return rows + [
            f"  {kinds.get(file.partition('-')[0], '')}{folder / file}" for file in self.files
        ]
