"""A model of a script: which programs it starts, in which order, with which variables.

It follows variables, functions, loops and branches. What only the job knows, such as `$1` or a
value that differs between branches, stays in the words as a `$variable`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, takewhile
from pathlib import Path

from rollcall.launch.scheduler.sbatch_options import FLAGS, SHORT
from rollcall.tools.lint.shell import DEEPEST, Command, UnbalancedError, Word, commands, plain

_SRUN_FLAGS = """
disable-status exact kill-on-bad-exit label multi-prog no-allocate overlap preserve-env pty
unbuffered immediate E H I K O Q X Z k l s u v
"""
SRUN_FLAGS = frozenset(_SRUN_FLAGS.split())
"""Further srun options without a value, or with one attached to the option."""
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
MOST_CALLS = 1000  # of functions, which may call each other twice
_LONGEST = 20_000  # letters of a value, which can double with each line
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\]|:?-[^}]*)?\})")
_DECLARES = ("export", "declare", "readonly", "local", "typeset")
_BEFORE = ("exec", "eval", "env", "nohup", "command", "stdbuf", "time")
"""The words before the name of the program that a command starts."""
_READS = ("read", "mapfile", "readarray", "getopts", "printf", "let", "unset")
"""Commands that give variables a value that is not written down."""
_OPENS = ("if", "while", "until", "for", "select", "case", "{", "(")
_CLOSES = ("fi", "done", "esac", "}", ")")
_BRANCHES = {"if", "case", "while", "until"}
"""Blocks that may be left out when the script runs."""
LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
_MODULES = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun"}
_MODULES |= {"accelerate.commands.launch": "accelerate", "deepspeed.launcher.runner": "deepspeed"}
_WRAPPERS = """
singularity apptainer singularity_wrapper shifter numactl timeout nsys nice taskset uv poetry conda
micromamba rocprof pipenv bash sh
"""
"""Programs that run another one, on the same machine."""
_NAMES_ONLY = """
echo printf which type pip pip3 cat [ [[ conda mamba micromamba module ml source . ls cd rm cp mv
mkdir alias unset trap kill pkill ssh test grep virtualenv pyenv hash tail head tar git docker
sbatch scancel spack rsync date set find chmod uv poetry hostname sed awk wait exit return sleep
wget curl export
"""
"""Programs that only name their arguments."""
_FLAGS = ("--standalone", "--module", "--no-python", "--no_python", "--run-path")
"""Options of torchrun without a value."""
_TOOLS = ("pip", "venv", "virtualenv", "ipykernel", "jupyter", "json.tool", "site")
"""Modules of Python that set up an environment."""


@dataclass(frozen=True)
class Training:
    """A launcher or a Python program, and the words after it."""

    name: str  # torchrun, accelerate, deepspeed or python
    arguments: tuple[str, ...]
    is_direct: bool  # nothing between the shell and it may start it on other nodes

    @property
    def hides_options(self) -> bool:
        """True if a variable, or a file, may contain further options."""
        if self.option("config-file") is not None:
            return True
        options = takewhile(lambda word: not word.endswith(".py"), self.arguments)
        return any(  # a variable that is not an option's value
            word.startswith("$")
            and ("=" in before or before in _FLAGS or not before.startswith("--"))
            for before, word in pairwise(("", *options))
        )

    def option(self, *names: str) -> str | None:
        """Return the value of the first of these options, which may be written with - or _."""
        for index, word in enumerate(self.arguments):
            option, equals, value = word.partition("=")
            if option.startswith("-") and option.lstrip("-").replace("_", "-") in names:
                return value if equals else "".join(self.arguments[index + 1 : index + 2])
        return None


@dataclass(frozen=True)
class Launch:
    """A command that starts a program, possibly as a Slurm step."""

    line: int
    end: str  # the operator after it, or after the block around it
    replaces_shell: bool  # whether it is started by exec
    step: dict[str, str] | None  # srun's options, `$` for variables; None without srun
    program: tuple[str, ...]  # its words, with known variables expanded
    variables: Mapping[str, Word]  # their values at this point
    exported: frozenset[str]
    is_condition: bool  # of if, while or until
    sees_failures: bool  # by set -e or a trap
    has_pipefail: bool
    blocks: tuple[str, ...]  # around it: the word that opens each, its identity and the branch

    @cached_property
    def training(self) -> Training | None:
        """The training that the command starts, itself or in a wrapper."""
        program, first = self.program, Path(self.program[0]).name
        if first in _NAMES_ONLY.split() and program[1:2] not in (("run",), ("exec",)):
            return None
        is_wrapper = first in _WRAPPERS.split()
        furthest = 16 if is_wrapper else 4
        for index, word in enumerate(program[:furthest]):
            name, after = Path(word).name, program[index + 1 :]
            if re.fullmatch(r"python[\d.]*", name):
                while after[:1] and re.fullmatch(r"-[uBEsSOIX]\w*", after[0]):
                    after = after[1:]
                module = after[1] if after[:1] == ("-m",) and after[1:] else ""
                if after[:1] in ((), ("-c",), ("-V",), ("--version",), ("-",)) or module in _TOOLS:
                    return None
                name = _MODULES.get(module, "python")
                after = after[2:] if name != "python" else after
            elif name == "accelerate" and after[:1] != ("launch",):
                continue
            if name in (*LAUNCHERS, "python"):
                return Training(name, after, index == 0 or is_wrapper)
        return None

    @cached_property
    def parts(self) -> list["Launch"]:
        """The programs in `bash -c '…'`; empty if the command is something else."""
        names = [Path(word).name for word in self.program]
        for index, name in enumerate(names[:-2]):
            if name in ("bash", "sh") and re.fullmatch(r"-\w*c", names[index + 1]):
                try:
                    inner = list(commands(self.program[index + 2], self.line))
                except UnbalancedError:
                    return []
                return launches(inner, False, self.variables, self.exported)
        return []

    def excludes(self, other: "Launch") -> bool:
        """Return True if the other one is in another branch of the same block."""
        pairs = zip(self.blocks, other.blocks, strict=False)
        return any(a != b and a.split()[:2] == b.split()[:2] for a, b in pairs)

    @property
    def trainings(self) -> list[Training]:
        """The trainings that the command starts, itself or in `bash -c '…'`."""
        inside = [part.training for part in self.parts]
        return [training for training in inside or [self.training] if training]

    def value(self, name: str) -> Word:
        """Return an exported variable's value and line; empty and 0 without one."""
        return self.variables.get(name, Word("", 0)) if name in self.exported else Word("", 0)


def launches(
    script: Sequence[Command],
    is_strict: bool,
    variables: Mapping[str, Word] | None = None,
    exported: frozenset[str] = frozenset(),
) -> list[Launch]:
    """Return the programs that these commands start, in the order in which they run.

    Args:
        is_strict: whether the shell starts with -e.
    """
    walk = _Walk(dict(variables or {}), set(exported), is_strict)
    walk.run(_tree(script), "\n", ())
    for name in [name for name in walk.functions if name not in walk.called]:
        walk.run(walk.functions[name], "\n", ("function",))  # a trap or srun may call it
    return walk.launches


@dataclass
class _Block:
    kind: str  # the word that opens it, or a function's name and ()
    items: list[tuple["Command | _Block", bool, int]] = field(default_factory=list)
    end: str = "\n"
    is_condition: bool = False  # whether the next command is one
    branch: int = 0  # of if and case, counted


def _tree(script: Sequence[Command]) -> _Block:
    """Return the commands in their blocks."""
    stack, function = [_Block("")], ""
    for command in script:
        words = list(command.words)
        while words:
            word, top = words[0].raw, stack[-1]
            if word in _OPENS and len(stack) < DEEPEST:
                block = _Block(f"{function}()" if function and word in "{(" else word)
                block.is_condition, function = word in _BRANCHES, ""
                top.items.append((block, top.is_condition, top.branch))
                stack.append(block)
                if word in ("for", "select"):  # the variable has a value that is not written down
                    block.items.append(
                        (Command(command.line, (Word("read", 0), *words[1:2]), ";"), True, 0)
                    )
                words = [] if word in ("for", "select", "case", "(") else words[1:]
            elif word in _CLOSES:
                if len(stack) > 1 and (word == ")") == (command.words[0].raw == ")"):
                    stack.pop().end = command.end
                words = []
            elif word in ("then", "do", "else", "elif", "!"):
                top.is_condition = word in ("elif", "!")
                top.branch += word in ("elif", "else")
                del words[0]
            elif word == "function" and words[1:]:
                function = words[1].raw.removesuffix("()")
                del words[:2]
            else:
                break
        if command.end == "(" and len(words) == 1:
            function = words[0].raw
        elif not (command.end == ")" and stack[-1].kind == "case") and (words or not command.words):
            command, top = replace(command, words=tuple(words)), stack[-1]
            top.items.append((command, top.is_condition, top.branch))
        stack[-1].branch += command.end == ";;"
    return stack[0]


class _Walk:
    """The state of the shell while it runs the commands."""

    def __init__(self, variables: dict[str, Word], exported: set[str], is_strict: bool) -> None:
        self.variables, self.exported = variables, exported
        self.is_strict, self.has_pipefail, self.has_trap = is_strict, False, False
        self.functions: dict[str, _Block] = {}
        self.called: list[str] = []
        self.launches: list[Launch] = []

    def run(
        self, block: _Block, end: str, blocks: tuple[str, ...], condition: bool = False
    ) -> None:
        """Run the commands of a block, after which the operator `end` follows."""
        before = dict(self.variables)
        for item, is_condition, branch in block.items:
            inside = (*blocks, f"{block.kind} {id(block)} {branch}") if block.kind else blocks
            inherited = end if item.end in ("\n", ";", "&&", ")", ";;") else item.end
            if isinstance(item, Command):
                self._command(item, inherited, inside, condition or is_condition)
            elif item.kind.endswith("()"):
                self.functions[item.kind[:-2]] = item
            else:
                self.run(item, inherited, inside, condition or is_condition)
        if block.kind in _BRANCHES:  # only the job knows whether they ran
            for name, word in self.variables.items():
                if name not in before or before[name].raw != word.raw:
                    self.variables[name] = _unknown(name, word.line)

    def _command(
        self, command: Command, end: str, blocks: tuple[str, ...], condition: bool
    ) -> None:
        raw, assigned, starts_exec, declares = list(command.words), dict[str, Word](), False, ""
        while raw:
            match = _ASSIGNMENT.fullmatch(raw[0].raw)
            if match:
                assigned[match[1]] = Word(self._value(match), raw[0].line)
                if declares:  # export A=1 B=$A
                    self.variables |= assigned
            elif raw[0].raw in _DECLARES:
                declares = raw[0].raw
            elif Path(raw[0].raw).name in _BEFORE:
                starts_exec |= raw[0].raw == "exec"
            elif declares and re.fullmatch(r"\w+", raw[0].raw):
                assigned[raw[0].raw] = self.variables.get(
                    raw[0].raw, _unknown(raw[0].raw, raw[0].line)
                )
            elif not declares and not (assigned and raw[0].raw.startswith("-")):
                break
            elif declares and raw[0].raw.startswith("-x"):
                declares = "export"
            del raw[0]
        if not raw:
            self.variables |= assigned
            self.exported |= set(assigned) if declares == "export" else set()
            return
        words = [text for word in raw for text in self._words(word)]
        if {("launch", "batch"), ("rollcall", "batch")} & set(pairwise(words)):
            # It starts the given step and forwards signals, as srun would.
            words = words[words.index("batch") + 1 :]
        if words and (function := self.functions.get(words[0])):
            is_inside = any(block.startswith(f"{function.kind} ") for block in blocks)
            if not is_inside and len(blocks) < DEEPEST and len(self.called) < MOST_CALLS:
                self.called.append(words[0])
                self.run(function, end, blocks, condition)
            return
        self._settings(words)
        step: dict[str, str] | None = None
        if words and Path(words[0]).name == "srun":
            step, words = _split_srun(words[1:])
        if words:
            seen = (condition, self.is_strict or self.has_trap, self.has_pipefail, blocks)
            known, exported = self.variables | assigned, frozenset({*self.exported, *assigned})
            program = (step, tuple(words), known, exported)
            self.launches.append(Launch(command.line, end, starts_exec, *program, *seen))

    def _settings(self, words: Sequence[str]) -> None:
        """Follow the commands that change the shell itself."""
        first, text = "".join(words[:1]), " ".join(words)
        if first == "set":
            if re.search(r"\s-\w*e\w*|-\w*o errexit", text):
                self.is_strict = True
            elif re.search(r"\s\+\w*e\w*|\+o errexit", text):
                self.is_strict = False
            self.has_pipefail |= "pipefail" in words and "+o" not in words
        elif first == "trap":
            self.has_trap |= "ERR" in words
        elif first in _READS:
            for word in words[1:]:
                if re.fullmatch(r"[A-Za-z_]\w*", word):
                    self.variables[word] = _unknown(word)

    def _value(self, match: re.Match[str]) -> str:
        """Return the value that NAME=value or NAME+=value gives the variable."""
        array = re.fullmatch(r"\((.*)\)", match[3], re.DOTALL)
        value = self.expand(" ".join(array[1].split()) if array else plain(match[3]))
        before = self.variables.get(match[1], Word("", 0)).raw
        value = f"{before}{' ' if array else ''}{value}" if match[2] else value
        return value[:_LONGEST]

    def _words(self, word: Word) -> list[str]:
        text = self.expand(plain(word.raw), is_quoted=word.raw.startswith("'"))
        # The shell splits unquoted variables into words, and arrays always.
        splits = re.match(r"\$", word.raw) or re.fullmatch(r'"\$\{\w+\[@\]\}"', word.raw)
        return text.split() if splits else [text]

    def expand(self, text: str, is_quoted: bool = False) -> str:
        """Expand the variables that the script sets.

        Args:
            is_quoted: whether a later shell expands them, for which line breaks in a value only
                separate words.
        """

        def value(match: re.Match[str]) -> str:
            word = self.variables.get(match[1] or match[2])
            text = word.raw if word else match[0]
            return " ".join(text.split("\n")) if is_quoted else text

        return _VARIABLE.sub(value, text)


def _unknown(name: str, line: int = 0) -> Word:
    return Word(f"${name}", line)


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
