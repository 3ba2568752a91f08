"""The time of training steps by phase, on each rank. No torch."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rollcall.records.run import Line
from rollcall.system.files import as_object


@dataclass(frozen=True)
class Phases(Line):
    """The time of the ranks in the steps since the line before; phases add up to `seconds`."""

    FILE = "phases.jsonl"
    PHASES: ClassVar = ("data", "forward", "backward", "communication", "optimizer", "other")

    step: int  # the newest step that the line covers
    steps: int  # how many steps it covers
    time: float  # seconds since 1970
    seconds: float  # wall clock of a step, mean; without evaluations and saves
    phases: dict[str, list[float]]  # mean seconds of a step in each of PHASES, by rank
    memory: list[float] | None = None  # peak bytes: allocated on the GPU, resident on a CPU
    reserved: list[float] | None = None  # peak bytes that PyTorch holds of the GPU
    host: list[float] | None = None  # resident bytes of the process

    @classmethod
    def forget_after(cls, directory: Path, step: int) -> None:
        """Cut off the lines of steps that are done again."""
        with contextlib.suppress(OSError), (directory / cls.FILE).open("rb+") as file:
            lines = file.readlines()
            while lines and ((last := cls.parse(as_object(lines[-1]))) is None or last.step > step):
                lines.pop()
            file.truncate(sum(map(len, lines)))
