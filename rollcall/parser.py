"""The parser of a command's words."""

import argparse


def parser(command: str, meaning: str | None) -> argparse.ArgumentParser:
    """Return a parser without arguments; its help shows the meaning verbatim."""
    return argparse.ArgumentParser(
        prog=f"rollcall {command}",
        description=meaning,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
