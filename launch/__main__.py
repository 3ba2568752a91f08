"""`python -m launch COMMAND …`: one file per command, each with a `main(argv)`."""

from __future__ import annotations

import importlib
import signal
import sys

import train.packages as _packages  # noqa: F401

COMMANDS = {
    "submit": "start a run on Slurm, or on this machine",
    "supervise": "run one node's part of a run (what a job starts on every node)",
    "batch": "start a job's step, and queue the job again when work is left",
    "status": "show how runs stand, in one table",
    "watch": "show that table, live",
    "logs": "show what ranks have printed, one by one or merged by time",
    "why": "explain a failure: the first one, on whichever node it was",
    "cancel": "end a run's job",
    "requeue": "start a run's job again, without Slurm's wait",
    "attach": "run a command on a node of a live run",
    "stacks": "show the Python stack of every rank of a live run",
    "reproduce": "submit a run's code, program and options again, under a new name",
    "drill": "do to a live run what will happen to it one day, and measure",
    "sweep": "submit a sweep from a file, or show its results",
    "lint": "find mistakes in sbatch scripts",
    "startup": "measure how long it takes from the command to the first step",
    "growth": "measure how submit, status and logs grow with what is recorded",
}


def main(argv: list[str]) -> int:
    """Run the command that the first word names; return its exit code."""
    if argv and argv[0] in COMMANDS:
        try:
            code: int = importlib.import_module(f"launch.{argv[0]}").main(argv[1:])
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        return code
    listing = "\n".join(f"  {name:<10} {meaning}" for name, meaning in COMMANDS.items())
    usage = f"Usage: python -m launch COMMAND [--help] ...\n\n{listing}"
    if argv and argv[0] in ("-h", "--help"):
        print(usage)
        return 0
    if argv:
        print(f"launch: error: there is no command '{argv[0]}'", file=sys.stderr)
    print(usage, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
