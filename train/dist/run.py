"""The facts that every part of a training run knows: its configuration, its ranks and its directory."""

from dataclasses import dataclass

from rollcall.config import Config
from rollcall.run_dir import RunDir
from rollcall.train.dist.world import World


@dataclass(frozen=True)
class Run:
    """One attempt of a run, seen from one rank."""

    config: Config
    world: World
    run_dir: RunDir

    def record(self, event: str, /, **fields: object) -> None:
        """Append an event to the run directory; only rank 0 does."""
        if self.world.is_main:
            self.run_dir.record(event, **fields)

    def say(self, text: str) -> None:
        """Print one line, on rank 0 only; rich redirects it above a progress bar."""
        if self.world.is_main:
            print(text, flush=True)

    def tell(self, event: str, text: str, **fields: object) -> None:
        """Print one line and append the event; only rank 0 does."""
        self.say(f"rollcall: {text}")
        self.record(event, **fields)
