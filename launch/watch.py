"""`python -m launch watch [RUN …]`: the table of `status`, live until Ctrl-C."""

from __future__ import annotations

from collections.abc import Sequence

from launch import status


def main(argv: Sequence[str]) -> int:
    """Show the table until it is interrupted; return the exit code."""
    return status.main(["--watch", *argv])
