"""`python -m rollcall.bench NAME …`: run one benchmark and print a table."""

import importlib
import signal
import sys

from rollcall.bench.turns import BenchError
from rollcall.process import leave

NAMES = ("startup", "step", "restart", "data", "growth", "metadata", "checkpoint", "memory")


def main(argv: list[str]) -> int:
    """Run the benchmark that the first word names; return its exit code."""
    if not argv or argv[0] not in NAMES:
        print(f"Usage: python -m rollcall.bench {'|'.join(NAMES)} [--help] ...", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # it ends what it has started
    try:
        code: int = importlib.import_module(f"rollcall.bench.{argv[0]}").main(argv[1:])
    except BenchError as error:
        print(f"rollcall: error: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
