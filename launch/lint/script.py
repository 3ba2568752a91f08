"""What does an sbatch script say? Its directives and, as far as lint needs them, its commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from launch.lint.options import FLAGS, SHORT, SRUN_FLAGS
from launch.lint.shell import Command, UnbalancedError, commands, plain

_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_BEFORE_COMMANDS = {*("if", "then", "else", "elif", "do", "while", "until", "!", "{", "time")}
_PREFIXES = {"exec", "env", "nohup", "command", "export", "declare", "readonly", "local", "stdbuf"}


@dataclass(frozen=True)
class Directive:
    """One option of a `#SBATCH` line; options are called by their long names."""

    line: int
    option: str
    value: str


class Finding(NamedTuple):
    """A mistake: where it stands, why it is one, and what to write instead."""

    line: int
    reason: str
    cure: str


@dataclass(frozen=True)
class Launch:
    """A command that starts a program, perhaps as a Slurm step.

    Attributes:
        line: where it stands.
        end: the operator behind it.
        replaces_shell: whether it stands behind exec.
        step: the options of srun; None without srun.
        program: what is started, word by word, known variables filled in.
    """

    line: int
    end: str
    replaces_shell: bool
    step: tuple[str, ...] | None
    program: tuple[str, ...]


class Script:
    """A script's directives and commands.

    Attributes:
        directives: those that sbatch reads.
        late: lines with directives that stand behind the first command.
        disabled: lines that look like directives and are comments.
        commands: empty if the script is none for a shell, or if `unbalanced`.
    """

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text
        self.lines = text.splitlines()
        self.directives: list[Directive] = []
        self.late: list[int] = []
        self.disabled: list[int] = []
        self.commands: list[Command] = []
        self.unbalanced: UnbalancedError | None = None
        shebang = self.lines[0] if text.startswith("#!") else "#!/bin/sh"
        self.is_shell = re.search(r"\b(ba|da|k|z)?sh\b", shebang) is not None
        if self.is_shell:
            try:
                self.commands = list(commands(text))
            except UnbalancedError as error:
                self.unbalanced = error
        self._read_directives()
        self._variables = self._assignments()

    def option(self, name: str) -> Directive | None:
        """The directive of this option that counts: the last."""
        found = [directive for directive in self.directives if directive.option == name]
        return found[-1] if found else None

    def value(self, name: str) -> str:
        """The value of an option, empty without it."""
        directive = self.option(name)
        return directive.value if directive else ""

    def expand(self, text: str) -> str:
        """The text with the variables filled in that the script itself sets."""
        pattern = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\]|:?-[^}]*)?\})")

        def replace(match: re.Match[str]) -> str:
            return self._variables.get(match[1] or match[2], match[0])

        for _ in range(5):  # variables that are made of variables
            text, before = pattern.sub(replace, text), text
            if text == before:
                break
        return text

    def launches(self, found: list[Command] | None = None) -> Iterator[Launch]:
        """The programs that the script, or the commands given, start."""
        for command in self.commands if found is None else found:
            words = self._words(command)
            exec_ = False
            while words and (
                words[0] in _BEFORE_COMMANDS | _PREFIXES or _ASSIGNMENT.match(words[0])
            ):
                exec_ |= words.pop(0) == "exec"
            if ("launch", "batch") in pairwise(words):
                # It starts the step that it is given and passes signals on, as srun itself would.
                words = words[words.index("batch") + 1 :]
            step: list[str] | None = None
            if words and Path(words[0]).name == "srun":
                step, words = _split_srun(words[1:])
            if words:
                options = None if step is None else tuple(step)
                yield Launch(command.line, command.end, exec_, options, tuple(words))

    def inner(self, launch: Launch) -> list[Command] | None:
        """The commands of `bash -c '…'`, or None if the launch is no such thing."""
        names = [Path(word).name for word in launch.program]
        for index, name in enumerate(names[:-2]):
            if name in ("bash", "sh") and re.fullmatch(r"-\w*c", names[index + 1]):
                try:
                    return list(commands(launch.program[index + 2], launch.line))
                except UnbalancedError:
                    return None
        return None

    def _read_directives(self) -> None:
        commands_begun = False
        texts = [
            range(each.line, each.line + each.lines) for each in self.commands if not each.words
        ]
        for number, line in enumerate(self.lines, 1):
            if any(number in text for text in texts):
                continue  # a script that this one writes
            if line.startswith("#SBATCH") and commands_begun:
                self.late.append(number)
            elif line.startswith("#SBATCH"):
                self.directives += _directives(line, number)
            elif re.match(r"(\s+#\s*|#\s+)SBATCH\s+-", line) and not commands_begun:
                self.disabled.append(number)
            elif line.strip() and not line.lstrip().startswith("#"):
                commands_begun = True

    def _assignments(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for command in self.commands:
            for word in command.words:
                match = _ASSIGNMENT.fullmatch(word.raw)
                if match is None and word.raw not in _PREFIXES | _BEFORE_COMMANDS:
                    break
                if match:
                    array = re.fullmatch(r"\((.*)\)", match[3], re.DOTALL)
                    value = " ".join(array[1].split()) if array else plain(match[3])
                    found[match[1]] = found.get(match[1], "") + value if match[2] else value
        return found

    def _words(self, command: Command) -> list[str]:
        words: list[str] = []
        for word in command.words:
            text = self.expand(plain(word.raw))
            # The shell splits what it finds in a variable without quotes; arrays it splits always.
            splits = re.match(r"\$", word.raw) or re.fullmatch(r'"\$\{\w+\[@\]\}"', word.raw)
            words += text.split() if splits else [text]
        return words


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


def _split_srun(words: list[str]) -> tuple[list[str], list[str]]:
    """The options of srun and the program with its own."""
    options: list[str] = []
    while words and (words[0].startswith("-") or (words[0].startswith("$") and len(words) > 1)):
        word = words.pop(0)
        options.append(word)
        short = re.fullmatch(r"-\w", word)
        needs_value = (word.startswith("--") and "=" not in word) or short
        if needs_value and word.lstrip("-") not in FLAGS | SRUN_FLAGS and words:
            options[-1] += f"={words.pop(0)}"
    return options, words
