"""An sbatch script: its directives and, as far as lint needs them, its commands."""

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from rollcall.launch.scheduler.sbatch_options import FLAGS, SHORT
from rollcall.tools.lint.model import Launch, launches
from rollcall.tools.lint.shell import Command, UnbalancedError, commands

PLACEHOLDER = "$TEMPLATE"
"""Stands for what is filled in before a script is submitted."""


@dataclass(frozen=True)
class Directive:
    """One option of a `#SBATCH` line, under its long name."""

    line: int
    option: str
    value: str


class Finding(NamedTuple):
    """A mistake: its line, why it is one, and what to write instead."""

    line: int
    reason: str
    fix: str


class Script:
    """A script's directives and commands."""

    def __init__(self, path: Path, text: str) -> None:
        self.has_dos_line_ends, self.has_byte_order_mark = "\r\n" in text, text[:1] == "\ufeff"
        text = _without_placeholders(text.removeprefix("\ufeff").replace("\r\n", "\n"))
        self.path, self.text, self.lines = path, text, text.splitlines()
        self.directives: list[Directive] = []  # that sbatch reads
        self.late: list[int] = []  # lines of directives after the first command
        self.disabled: list[int] = []  # lines of comments that look like directives
        self.commands: list[Command] = []  # empty if it is not a shell script, or `unbalanced`
        self.unbalanced: UnbalancedError | None = None
        shebang = self.lines[0] if text.startswith("#!") else ("sh", "py")[path.suffix == ".py"]
        self.is_shell = re.search(r"\b(ba|da|k|z)?sh\b", shebang) is not None
        if self.is_shell:
            try:
                self.commands = list(commands(text))
            except UnbalancedError as error:
                self.unbalanced = error
        self._read_directives()

    def option(self, name: str) -> Directive | None:
        """Return the last directive of this option, which is the one that counts."""
        return next((item for item in reversed(self.directives) if item.option == name), None)

    def value(self, name: str) -> str:
        """Return the value of an option; empty if the script does not set it."""
        directive = self.option(name)
        return directive.value if directive else ""

    @cached_property
    def launches(self) -> list[Launch]:
        """The programs that the script starts, in the order in which they run."""
        return launches(self.commands, re.match(r"#!.*\s-\w*e", self.text) is not None)

    @property
    def steps(self) -> list[Launch]:
        """The programs that srun starts."""
        return [launch for launch in self.launches if launch.step is not None]

    def _read_directives(self) -> None:
        commands_begun = False
        documents = [document for document in self.commands if not document.words]
        texts = [range(document.line, document.line + document.lines) for document in documents]
        for number, line in enumerate(self.lines, 1):
            if any(number in text for text in texts):
                continue  # the text of a script that this one writes
            if line.startswith("#SBATCH") and commands_begun:
                self.late.append(number)
            elif line.startswith("#SBATCH"):
                read = _directives(line, number)
                self.directives += [item for item in read if PLACEHOLDER not in item.value]
            elif re.match(r"(\s+#\s*|#\s+)SBATCH\s+-", line) and not commands_begun:
                self.disabled.append(number)
            elif line.strip() and not line.lstrip().startswith("#"):
                commands_begun = True


Rule = Callable[[Script], Iterator[Finding]]
"""A check of scripts; its name with hyphens is shown behind what it finds."""


def _without_placeholders(text: str) -> str:
    """Replace what a template engine or a person fills in by a variable that nobody sets."""
    text = re.sub(r"\{%.*?%\}|\{#.*?#\}", "", text)
    text = re.sub(r"(?<!\$)(\{\{.*?\}\}|\{[A-Z][A-Z_]*\}|\{ \w+ \})", PLACEHOLDER, text)
    # <your account>: unlike a redirection, with no blank after < and before >.
    return re.sub(r"(?<=[\s=\"'/:])<[A-Za-z][\w-]*(?: [\w-]+)*>(?![>&(])", PLACEHOLDER, text)


def _directives(line: str, number: int) -> Iterator[Directive]:
    try:
        words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
    except ValueError:
        words = line.removeprefix("#SBATCH").split()
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") and word.startswith("-"):
            name, equals, value = SHORT.get(word[1:2], word[:2]), word[2:], word[2:].lstrip("=")
        if not equals and name not in FLAGS and words and not words[0].startswith("-"):
            value = words.pop(0)
        yield Directive(number, name, value)
