"""`rollcall watch [RUN …]`: show the table of `rollcall status`, live until Ctrl-C."""

from collections.abc import Sequence

from rollcall.launch.commands import status
from rollcall.launch.runs import find


def main(argv: Sequence[str]) -> int:
    """Show the table until it is interrupted; return the exit code."""
    options = find.parser("watch", __doc__, nargs="*").parse_args(argv)
    return status.show(options.run, options.root, is_live=True)
