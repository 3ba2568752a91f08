"""`rollcall lint FILE…`: find common mistakes in sbatch scripts.

Exit code: 0 without findings, 1 with findings, 2 if a file cannot be read.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from inspect import isfunction
from pathlib import Path

from rollcall.launch.lint import directives, launches
from rollcall.launch.lint.script import Finding, Script
from rollcall.parser import parser as command_parser

Rule = Callable[[Script], Iterator[Finding]]

RULES: list[Rule] = [
    rule
    for module in (directives, launches)
    for rule in vars(module).values()
    if isfunction(rule) and rule.__module__ == module.__name__ and rule.__name__[0] != "_"
]
"""The public functions of these modules."""


def main(argv: Sequence[str]) -> int:
    """Print the findings of the scripts; return the exit code."""
    parser = command_parser("lint", "Find mistakes in sbatch scripts.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    code = 0
    for path in parser.parse_args(argv).files:
        try:
            script = Script(path, path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            print(f"rollcall: error: {path} cannot be read: {reason}", file=sys.stderr)
            code = 2
            continue
        for line in check(script):
            print(line)
            code = max(code, 1)
    return code


def check(script: Script) -> list[str]:
    """Return a script's findings, sorted by line: `file:line: reason`, fix and rule."""
    found = sorted((finding, name(rule)) for rule in RULES for finding in rule(script))
    return [
        f"{script.path}:{it.line}: {it.reason}\n    fix: {it.fix} [{rule}]" for it, rule in found
    ]


def name(rule: Rule) -> str:
    """Return the rule's name as findings show it."""
    return rule.__name__.replace("_", "-")
