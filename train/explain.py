"""`python -m train explain [recipe] [key=value …]`: every value, and where it comes from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import reduce

import yaml

from train.config import ConfigError, origins, parse


def main(words: Sequence[str]) -> int:
    """Print a line for each key; return the exit code."""
    if "--help" in words or "-h" in words:
        print(__doc__)
        return 0
    try:
        _, config = parse(words)
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"explain: error: {line}", file=sys.stderr)
        return 2
    lines = []
    for key, origin in origins(words).items():
        value = reduce(getattr, key.split("."), config)
        text = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()
        lines.append((f"{key}={text}", origin))
    width = max(len(setting) for setting, _ in lines)
    for setting, origin in lines:
        print(f"{setting:<{width}}  # {origin}")
    return 0
