"""The parser of a command's words."""

import argparse
import re
from typing import NoReturn

from rollcall.messages.text import did_you_mean


class Parser(argparse.ArgumentParser):
    """A parser that answers a misspelled option with the nearest one, in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit."""
        start, _, words = message.partition("unrecognized arguments: ")
        if not start and words.startswith("-"):
            options = re.findall(r"(?<![\w-])--[a-z-]+", self.format_help())
            hint = did_you_mean(words.split()[0].partition("=")[0], options, 0.75)
            message += hint or f"; choose {', '.join(sorted(set(options)))}"
        if message.endswith(": RUN"):
            message += "; `rollcall status` lists the runs"
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")


def parser(command: str, meaning: str | None) -> argparse.ArgumentParser:
    """Return a parser without arguments; its help shows the meaning verbatim."""
    return Parser(
        prog=f"rollcall {command}",
        description=meaning,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
