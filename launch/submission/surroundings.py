"""What a run takes from the place where it is submitted: a Python, other modules, data."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from rollcall.config import Config, plugin
from rollcall.installation import ROOT
from rollcall.launch.program import container, data, python
from rollcall.launch.program.find import Program, UserCode
from rollcall.launch.program.python import Facts, Imports, ProgramError
from rollcall.launch.scheduler import slurm
from rollcall.launch.scheduler.job import Job
from rollcall.launch.submission import snapshot
from rollcall.launch.submission.options import CommandLine
from rollcall.launch.submission.snapshot import Snapshot
from rollcall.launch.submission.submission import note
from rollcall.records.job import JobRecord
from rollcall.refusal import RefusedError
from rollcall.requirements import PACKAGES
from rollcall.run_dir import RunDir

MOST_NOTES = 5
"""Number of paths that are missing in the job and that a submission names."""


@dataclass(frozen=True)
class Surroundings:
    """The Python of a job, and what its program needs from elsewhere."""

    line: CommandLine
    words: tuple[str, ...]  # the program and its arguments; empty for the built-in training
    code: UserCode | None  # the directory that is copied; None if it is rollcall's own
    facts: Facts  # what the Python says about the program
    found: Imports  # where the program's modules are
    links: tuple[str, ...]  # what the copy has as links, relative to `code.checkout`

    @property
    def modules(self) -> tuple[Snapshot, ...]:
        """The user's modules outside the checkout, to copy; RefusedError if too large."""
        return tuple(snapshot.plan_modules(*entry) for entry in self.found.outside.items())

    @property
    def remarks(self) -> tuple[str, ...]:
        """The line of a dry run about the Python."""
        if image := self.line.own.container:
            return (f"python: the one in the container {image}",)
        return tuple(self.facts.describe())

    def warn(self, copy: Snapshot) -> None:
        """Print a note for everything that the job will lack, as far as that can be known."""
        lacks = [] if self.line.own.dry_run or self.line.own.container else self.facts.lacks()
        for text in lacks:
            note(text)
        if self.code is None:
            return
        missing = data.left_out(self.words[1:], copy.files, copy.links, self.code)
        for text in islice(chain(missing, self._ignored_in_modules()), MOST_NOTES):
            note(text)

    def _ignored_in_modules(self) -> Iterator[str]:
        for root, names in self.found.outside.items():
            with contextlib.suppress(RefusedError):  # outside git, all files are copied
                for name in snapshot.ignored(root, names):
                    if not name.endswith((".py", ".so", ".pyc", "__pycache__/")):
                        yield (
                            f"{root / name}, in a module that is copied, will not exist in the "
                            "copy: git ignores it. Let your script use its absolute path"
                        )

    def placed(self, job: Job, run: RunDir) -> Job:
        """Return the job with this Python, and with the places of the program's modules."""
        at = job.command.index("--")
        modules = [f"--modules={path}" for path in self._searched(run)]
        rest = (*job.command[1:at], *modules, *job.command[at:])
        own = self.line.own
        if own.container:
            linked = [str(self.code.checkout / name) for name in self.links if self.code]
            mounts = [str(run.path.parent), *linked, *own.mount]
            with_srun = slurm.is_available() and not own.local
            srun, before = container.plan(
                own.container, mounts, job.directory, job.gpus > 0, with_srun
            )
            words = (*before, own.python or "python3")
            return replace(job, command=(*words, *rest), srun=(*job.srun, *srun), python=words)
        if python.is_other(self.facts.executable) and own.python:
            words = (python.find(own.python),)
            return replace(job, command=(*words, *rest), python=words)
        return replace(job, command=(job.command[0], *rest))

    def _searched(self, run: RunDir) -> list[str]:
        if run.code.exists() and not self.line.own.new_code:  # it keeps the code that it has
            record = JobRecord.read(run.path)
            before = record.more.get("command", []) if record else []
            return [word[10:] for word in before if word.startswith("--modules=")]
        places = [run.code / path for path in self.found.inside]
        places += [run.modules(number) for number in range(len(self.found.outside))]
        places += [run.launcher] if self.found.needs_rollcall and self.code else []
        return [str(path) for path in places]


def of(
    line: CommandLine, code: UserCode | None, script: Program | None, config: Config
) -> Surroundings:
    """Look at the Python that a command line names, and at what its program imports.

    Raises:
        ProgramError: the Python or a module is missing, or a path of `--link` is wrong.
    """
    own = line.own
    if own.mount and not own.container:
        raise ProgramError("--mount: only a container needs it; add --container IMAGE")
    uses_own = bool(own.python) and not own.container
    executable = python.find(own.python) if uses_own else sys.executable
    words: list[str] = []
    if script is not None:
        words = list(script.words[:2] if script.words[0] == "-m" else script.words[:1])
        if words[0] != "-m":
            words = [os.path.abspath(words[0])]  # noqa: PTH100 - a link stays what it is
    else:
        names = [text.partition(":")[0] for _, text in plugin.named(config.model_dump())]
        names += ["pydantic", *PACKAGES] if uses_own else []
        words = ["-m", *names] if names else []
    facts = python.ask(executable, Path.cwd(), words)
    if words[:1] == ["-m"] and not own.container:
        _check_modules(facts, words[1:], script is None and uses_own)
    if own.start_method == "torchrun" and not facts.versions["torch"] and not own.container:
        raise ProgramError(f"--start-method torchrun: {facts.executable} does not have torch")
    checkout = code.checkout if code else ROOT
    linked = data.links(own.link, checkout)
    found = python.imports(facts, checkout)
    return Surroundings(line, script.words if script else (), code, facts, found, linked)


def _check_modules(facts: Facts, names: Sequence[str], needs_packages: bool) -> None:
    """Refuse a program whose own module does not exist, or a training without its packages."""
    tops = [name.partition(".")[0] for name in names]
    absent = [name for name in tops if name in facts.missing]
    if needs_packages and absent:
        raise ProgramError(
            f"--python: {facts.executable} does not have {', '.join(absent)}, which rollcall's own "
            "training needs; a script of your own (after `--`) needs none of them"
        )
    if absent:
        where = f"in {Path.cwd()}, and none installed for {facts.executable}"
        raise ProgramError(f"-m {names[tops.index(absent[0])]}: no module {absent[0]} {where}")
