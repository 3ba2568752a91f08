"""The parser of a command's words."""

import argparse
import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NoReturn

from rollcall.cli.commands import COMMANDS
from rollcall.messages.text import did_you_mean

WORDS = {
    r"^argument ([^ :/]+)\S*: ": r"\1: ",
    "invalid int value: ": "expected a whole number, got ",
    r"ignored explicit argument (.*)": r"expected no value, got \1",
    "invalid float value: ": "expected a number, got ",
    "expected (one|at least one) argument": "expected a value",
}
"""Patterns of argparse's messages, and the words of rollcall's."""


class Parser(argparse.ArgumentParser):
    """A parser that answers a mistake in one line, with the nearest word or the valid ones."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse, and refuse what a command of a command does not take: its parent knows less."""
        for word in takewhile("--".__ne__, args):  # for which argparse of Python 3.11 has a list
            if re.fullmatch(r"--[a-z-]+=--", word):
                self.error(f"{word}: expected a value, not '--'")
        options, rest = super().parse_known_args(args, namespace)
        if rest and " " in self.prog.removeprefix("rollcall "):
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return options, rest

    def parse_with_keys(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the options and the `key=value` words."""
        options, rest = self.parse_known_args(words)
        if wrong := [word for word in rest if word.startswith("-") or "=" not in word]:
            self.error(f"unrecognized arguments: {' '.join(wrong)}")
        return options, rest

    def error(self, message: str) -> NoReturn:
        """Print the line and exit."""
        start, _, words = message.partition("unrecognized arguments: ")
        names = {str(a.metavar or a.dest): a for a in self._actions if not a.option_strings}
        if not start:
            shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
            options = {o for a in shown for o in a.option_strings if o[:2] == "--"} - {"--help"}
            word = words.split()[0].partition("=")[0] if words.startswith("-") else ""
            hint = did_you_mean(word, options, 0.75)
            if self.prog == "rollcall doctor" and word in ("--nodes", "--partition"):
                hint = f"; write rollcall submit --doctor {words}, which checks the nodes of a job"
            message += hint or f"; expected only {', '.join([*names, *sorted(options)])}"
        elif message.endswith(": RUN"):
            message += "; `rollcall status` lists the runs"
        elif (missing := names.get(message.split()[-1])) and "required: " in message:
            choices = ", ".join(map(str, missing.choices or ()))
            message += f"; choose {choices}" if choices else f", {missing.help}"
        self.exit(2, f"{self.prog}: error: {plain(message)} (--help lists the options)\n")


def plain(message: str) -> str:
    """Return argparse's message about a value in rollcall's words, with the nearest choice."""
    for pattern, text in WORDS.items():
        message = re.sub(pattern, text, message)
    if match := re.fullmatch(r"(.*)invalid choice: '?(.*?)'? \(choose from (.*)\)", message):
        name, value, choices = match[1], match[2], match[3].replace("'", "")
        hint = did_you_mean(value, choices.split(", "))
        if name == "COMMAND: " and value in COMMANDS:
            hint = f"; `rollcall {value}` is a command of its own"
        message = f"{name}expected one of {choices}; got '{value}'{hint}"
    return message


def parser(command: str, meaning: str | None) -> Parser:
    """Return a parser without arguments; its help shows the meaning verbatim."""
    form = argparse.RawDescriptionHelpFormatter
    name = f"rollcall {command}"
    return Parser(name, description=meaning, formatter_class=form, allow_abbrev=False)
