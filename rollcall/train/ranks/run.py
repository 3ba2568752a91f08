"""The facts that every part of a training run knows: configuration, ranks, directory, progress."""

import sys
from dataclasses import dataclass, field

import torch

from rollcall.config import Config
from rollcall.records.run_dir import RunDir
from rollcall.system.files import write_atomic
from rollcall.train.ranks.measures import Measures, Reduce
from rollcall.train.ranks.world import World


@dataclass
class Progress:
    """How far a run has come, the same on all ranks."""

    step: int = 0  # updates done; updates that a rollback left out count too
    steps: int = 0  # of the whole run

    @property
    def is_over(self) -> bool:
        """True if the newest step is the last one of the run."""
        return self.step >= self.steps


@dataclass(frozen=True)
class Run:
    """One attempt of a run, seen from one rank."""

    config: Config
    world: World
    run_dir: RunDir
    progress: Progress = field(default_factory=Progress)
    measures: Measures = field(default_factory=Measures)

    def claim_directory(self) -> None:
        """Make the run directory this attempt's; OSError if that fails. Only rank 0 calls it."""
        self.run_dir.create()
        self.run_dir.claim(self.run_dir.attempt_of(1))
        self.run_dir.check_claim()
        write_atomic(self.run_dir.config, self.config.to_yaml())

    def record(self, event: str, /, **fields: object) -> None:
        """Append an event to the run directory; only rank 0 does."""
        if self.world.is_main:
            self.run_dir.record(event, **fields)

    def say(self, text: str) -> None:
        """Print one line, on rank 0 only; rich redirects it above a progress bar."""
        if self.world.is_main:
            print(text, flush=True)

    def warn(self, text: str) -> None:
        """Print a warning, unless it is empty; only rank 0 does."""
        if text and self.world.is_main:
            print(f"rollcall: warning: {text}", file=sys.stderr, flush=True)

    def tell(self, event: str, text: str, **fields: object) -> None:
        """Print one line and append the event; only rank 0 does."""
        self.say(f"rollcall: {text}")
        self.record(event, **fields)

    def measure(self, name: str, value: float | torch.Tensor, reduce: Reduce = "mean") -> None:
        """Add a number to the next line of metrics.jsonl; see `rollcall.measure`."""
        self.measures.add(name, value, reduce)
