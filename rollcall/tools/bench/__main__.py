"""`rollcall bench NAME …`: run one benchmark and print its tables, with what they depend on."""

import importlib
import signal
import sys
from collections.abc import Sequence

from rollcall.messages.text import did_you_mean, table
from rollcall.system.process import leave
from rollcall.tools.bench import turns
from rollcall.tools.bench.turns import BenchError

NAMES = {
    "speedup": "how much faster more ranks are, and why not more",
    "overhead": "a step beside a bare loop and other frameworks",
    "experts": "a step with experts beside a dense one and plain PyTorch",
    "startup": "from the command to the first step",
    "restart": "from a killed rank to the next first step",
    "checkpoint": "saves and loads beside torch's ways",
    "data": "samples per second beside DataLoader",
}
SHORT = {"step": "overhead", "start": "startup", "save": "checkpoint", "load": "checkpoint"}
"""Other names of some."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that the first word names; return its exit code."""
    usage = "\n  ".join(["Usage: rollcall bench NAME [--help] ...", *table([*NAMES.items()])])
    if argv and argv[0] in ("-h", "--help"):
        print(usage)
        return 0
    name = SHORT.get(argv[0], argv[0]) if argv else ""
    if name not in NAMES:
        hint = did_you_mean(name, [*NAMES, *SHORT]) or f"; choose {', '.join(NAMES)}"
        wrong = f"unknown benchmark '{name}'" if argv else "expected the name of a benchmark"
        print(f"rollcall bench: error: {wrong}{hint}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # it ends what it has started
    if {"-h", "--help"}.isdisjoint(argv):
        turns.begin(argv)
    try:
        return int(importlib.import_module(f"rollcall.tools.bench.{name}").main(argv[1:]))
    except BenchError as error:
        print(f"rollcall bench: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
