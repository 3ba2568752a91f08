"""An sbatch script: its directives and, as far as lint needs them, its commands."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rollcall.launch.lint.shell import Command, UnbalancedError, Word, commands, plain
from rollcall.launch.scheduler.sbatch_options import FLAGS, SHORT, SRUN_FLAGS

_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_NOT_PROGRAMS = {
    *("if", "then", "else", "elif", "do", "while", "until", "!", "{", "time"),
    *("exec", "env", "nohup", "command", "export", "declare", "readonly", "local", "stdbuf"),
}
"""Words before the name of the program that a command starts."""
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


@dataclass(frozen=True)
class Launch:
    """A command that starts a program, possibly as a Slurm step."""

    line: int
    end: str  # the operator after it
    replaces_shell: bool  # whether it is started by exec
    step: dict[str, str] | None  # srun's options, `$` for variables; None without srun
    program: tuple[str, ...]  # its words, with known variables expanded


class Script:
    """A script's directives and commands."""

    def __init__(self, path: Path, text: str) -> None:
        text = _without_placeholders(text)
        self.path, self.text, self.lines = path, text, text.splitlines()
        self.directives: list[Directive] = []  # that sbatch reads
        self.late: list[int] = []  # lines of directives after the first command
        self.disabled: list[int] = []  # lines of comments that look like directives
        self.commands: list[Command] = []  # none if it is no shell script, or `unbalanced`
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
        """Return the last directive of this option, which is the one that counts."""
        found = [directive for directive in self.directives if directive.option == name]
        return found[-1] if found else None

    def value(self, name: str) -> str:
        """Return the value of an option; empty if the script does not set it."""
        directive = self.option(name)
        return directive.value if directive else ""

    def expand(self, text: str, is_quoted: bool = False) -> str:
        """Expand the variables that the script itself sets.

        Args:
            is_quoted: whether a later shell expands them, for which line breaks in a value only
                separate words.
        """
        pattern = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\]|:?-[^}]*)?\})")

        def replace(match: re.Match[str]) -> str:
            value = self._variables.get(match[1] or match[2], match[0])
            return " ".join(value.split("\n")) if is_quoted else value

        for _ in range(5):  # values may contain variables
            text, before = pattern.sub(replace, text), text
            if text == before:
                break
        return text

    def assigned(self, name: str) -> Iterator[Word]:
        """Yield the values that a variable gets, as written but for quotes around the whole."""
        for command in self.commands:
            for word in command.words:
                if match := re.fullmatch(rf"{name}=([\"']?)(.*)\1", word.raw, re.DOTALL):
                    yield Word(match[2], word.line)

    def steps(self) -> list[Launch]:
        """Return the programs that srun starts."""
        return [launch for launch in self.launches() if launch.step is not None]

    def launches(self, found: list[Command] | None = None) -> Iterator[Launch]:
        """Yield the programs that the script, or the given commands, start."""
        for command in self.commands if found is None else found:
            words = self._words(command)
            exec_ = False
            while words and (words[0] in _NOT_PROGRAMS or _ASSIGNMENT.match(words[0])):
                exec_ |= words.pop(0) == "exec"
            if {("launch", "batch"), ("rollcall", "batch")} & set(pairwise(words)):
                # It starts the given step and forwards signals, as srun would.
                words = words[words.index("batch") + 1 :]
            step: dict[str, str] | None = None
            if words and Path(words[0]).name == "srun":
                step, words = _split_srun(words[1:])
            if words:
                yield Launch(command.line, command.end, exec_, step, tuple(words))

    def inner(self, launch: Launch) -> list[Command] | None:
        """Return the commands of `bash -c '…'`; None if the launch is something else."""
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
        documents = [each for each in self.commands if not each.words]
        texts = [range(each.line, each.line + each.lines) for each in documents]
        for number, line in enumerate(self.lines, 1):
            if any(number in text for text in texts):
                continue  # the text of a script that this one writes
            if line.startswith("#SBATCH") and commands_begun:
                self.late.append(number)
            elif line.startswith("#SBATCH"):
                found = _directives(line, number)
                self.directives += [each for each in found if PLACEHOLDER not in each.value]
            elif re.match(r"(\s+#\s*|#\s+)SBATCH\s+-", line) and not commands_begun:
                self.disabled.append(number)
            elif line.strip() and not line.lstrip().startswith("#"):
                commands_begun = True

    def _assignments(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for command in self.commands:
            for word in command.words:
                match = _ASSIGNMENT.fullmatch(word.raw)
                if match is None and word.raw not in _NOT_PROGRAMS:
                    break
                if match:
                    array = re.fullmatch(r"\((.*)\)", match[3], re.DOTALL)
                    value = " ".join(array[1].split()) if array else plain(match[3])
                    before = found.get(match[1], "")
                    own = re.compile(rf"\$(?:{match[1]}\b|\{{{match[1]}(?:\[[@*]\])?\}})")
                    value = own.sub(before.replace("\\", r"\\"), value)  # CMD="$CMD --more"
                    if match[2]:  # NAME+=value
                        value = f"{before}{' ' if array else ''}{value}"
                    found[match[1]] = value
        return found

    def _words(self, command: Command) -> list[str]:
        words: list[str] = []
        for word in command.words:
            text = self.expand(plain(word.raw), is_quoted=word.raw.startswith("'"))
            # The shell splits unquoted variables into words, and arrays always.
            splits = re.match(r"\$", word.raw) or re.fullmatch(r'"\$\{\w+\[@\]\}"', word.raw)
            words += text.split() if splits else [text]
        return words


def _without_placeholders(text: str) -> str:
    """Replace what a template engine or a person fills in by a variable that nobody sets."""
    text = re.sub(r"\{%.*?%\}|\{#.*?#\}", "", text)
    text = re.sub(r"(?<!\$)(\{\{.*?\}\}|\{[A-Z][A-Z_]*\})", PLACEHOLDER, text)
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


def _split_srun(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of srun under their long names, and the program."""
    options: dict[str, str] = {}
    while words and (words[0].startswith("-") or (words[0].startswith("$") and len(words) > 1)):
        word = words.pop(0)
        needs_value = re.fullmatch(r"-\w|--[^=]*", word)
        if needs_value and word.lstrip("-") not in FLAGS | SRUN_FLAGS and words:
            word += f"={words.pop(0)}"
        name, _, value = word.lstrip("-").partition("=")
        if not word.startswith("--"):
            name, value = SHORT.get(name[:1], name[:1]), value or name[1:]
        options["$" if name.startswith("$") else name] = value
    return options, words
