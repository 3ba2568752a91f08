"""Slurm's reasons and states, and signals, explained in plain English: reasons.toml."""

import signal
import tomllib
from pathlib import Path

_TABLES = tomllib.loads(Path(__file__).with_name("reasons.toml").read_text())
PENDING: dict[str, str] = _TABLES["pending"]
ENDED: dict[str, str] = _TABLES["ended"]
SHARES: dict[str, str] = _TABLES["shares"]
SIGNALS = {signal.Signals[name]: cause for name, cause in _TABLES["signals"].items()}
NO_THREADS = "the limit of processes and threads is reached: see ulimit -u, and the job's pids.max"


def pending(reason: str) -> str:
    """Explain why a job waits; squeue's reason may have details after a comma."""
    word = reason.strip("()").partition(",")[0]
    if word in PENDING:
        return PENDING[word]
    if word.startswith(("QOS", "Assoc", "Max")):
        limit = next((text for part, text in _TABLES["limits"].items() if part in word), "a limit")
        owner = {"Q": "its QOS", "A": "its account"}.get(word[0], "the site")
        return f"{word}: {owner} limits {limit}"
    return word


def is_held(reason: str) -> bool:
    """Return True if a job does not start by itself, whatever time Slurm expects."""
    return any(word in pending(reason) for word in ("held", "holds it", "never starts"))


def ended(state: str) -> str:
    """Explain how Slurm ended a job, by its state."""
    return ENDED.get(state, f"Slurm says {state}")


def signal_of(exit_code: int) -> int | None:
    """Return the signal that an exit code means; None for a program's own code, such as 255."""
    return exit_code - 128 if exit_code - 128 in signal.valid_signals() else None


def of_signal(number: int) -> tuple[str, str]:
    """Return a signal's name and what usually causes it; empty if nothing does."""
    try:
        known = signal.Signals(number)
    except ValueError:  # a real-time signal, of which only the first and the last have names
        return f"signal {number}", ""
    return known.name, SIGNALS.get(known, "")
