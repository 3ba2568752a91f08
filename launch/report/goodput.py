"""The shares of a run's wall clock."""

from dataclasses import dataclass

from rollcall.run_dir import RunDir


@dataclass(frozen=True)
class Shares:
    """Seconds of the wall clock, and of each share of it, by name."""

    wall: float
    shares: dict[str, float]


def shares(_run: RunDir) -> Shares | None:
    """Return the shares of a run; None if nothing is known."""
    return None
