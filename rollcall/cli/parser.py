"""The parser of a command's words."""

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from rollcall.messages.text import did_you_mean

VALUES = {
    r"^argument ([^ :/]+)\S*: ": r"\1: ",
    "invalid int value: ": "expected a whole number, got ",
    "invalid float value: ": "expected a number, got ",
    "expected (one|at least one) argument": "expected a value",
}
"""Patterns of argparse's messages, and the words of rollcall's."""


class Parser(argparse.ArgumentParser):
    """A parser that answers a mistake in one line, with the nearest word or the valid ones."""

    def parse_with_keys(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the options and the `key=value` words."""
        options, rest = self.parse_known_args(words)
        if wrong := [word for word in rest if word.startswith("-") or "=" not in word]:
            self.error(f"unrecognized arguments: {' '.join(wrong)}")
        return options, rest

    def error(self, message: str) -> NoReturn:
        """Print the line and exit."""
        start, _, words = message.partition("unrecognized arguments: ")
        if not start and words.startswith("-"):
            options = re.findall(r"(?<![\w-])--[a-z-]+", self.format_help())
            hint = did_you_mean(words.split()[0].partition("=")[0], options, 0.75)
            message += hint or f"; choose {', '.join(sorted(set(options)))}"
        elif not start:
            takes = [str(it.metavar or it.dest) for it in self._actions if not it.option_strings]
            message += f"; expected only {' '.join([*takes, 'and options'][not takes :])}"
        if message.endswith(": RUN"):
            message += "; `rollcall status` lists the runs"
        for action in self._actions:
            if action.choices and message.endswith(f": {action.metavar or action.dest}"):
                message += f"; choose {', '.join(map(str, action.choices))}"
        self.exit(2, f"{self.prog}: error: {plain(message)} (--help lists the options)\n")


def plain(message: str) -> str:
    """Return argparse's message about a value in rollcall's words, with the nearest choice."""
    for pattern, text in VALUES.items():
        message = re.sub(pattern, text, message)
    if match := re.fullmatch(r"(.*)invalid choice: '?(.*?)'? \(choose from (.*)\)", message):
        name, value, choices = match.groups()
        choices = choices.replace("'", "")
        message = f"{name}expected one of {choices}; got '{value}'"
        message += did_you_mean(value, choices.split(", "))
    return message


def parser(command: str, meaning: str | None) -> Parser:
    """Return a parser without arguments; its help shows the meaning verbatim."""
    return Parser(
        prog=f"rollcall {command}",
        description=meaning,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
