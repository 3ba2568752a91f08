"""The surroundings of a run, from where it is submitted: a Python, modules, data, a container."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from rollcall.cli.installation import CALL, ROOT
from rollcall.config import Config
from rollcall.config.arguments import named_code
from rollcall.launch.program import data, python
from rollcall.launch.program.find import UserCode
from rollcall.launch.program.python import Facts, Imports, ProgramError
from rollcall.launch.scheduler import slurm
from rollcall.launch.scheduler.job import Job
from rollcall.launch.submission import snapshot
from rollcall.launch.submission.options import CommandLine
from rollcall.messages.requirements import PACKAGES
from rollcall.messages.text import listed, note
from rollcall.records.job import JobRecord
from rollcall.records.run_dir import RunDir

CONTAINER_PROGRAMS = ("apptainer", "singularity")


@dataclass(frozen=True)
class Surroundings:
    """The Python of a job, and what its program needs from elsewhere."""

    line: CommandLine
    code: UserCode | None  # the directory that is copied; None if it is rollcall's own
    facts: Facts  # what the Python says about the program
    found: Imports  # where the program's modules are
    links: tuple[str, ...]  # what the copy has as links, relative to `code.checkout`

    @property
    def modules(self) -> tuple[snapshot.Snapshot, ...]:
        """The user's modules outside the checkout, to copy; RefusedError if too large."""
        return tuple(snapshot.plan_modules(*entry) for entry in self.found.outside.items())

    @property
    def remarks(self) -> tuple[str, ...]:
        """The line of a dry run about the Python."""
        if image := self.line.own.container:
            return (f"python: the one in the container {image}",)
        return tuple(self.facts.describe())

    def warn(self, copy: snapshot.Snapshot) -> None:
        """Print a note for everything that the job will lack, as far as that can be known."""
        if self.facts.missing and not (self.line.own.dry_run or self.line.own.container):
            for text in self.facts.lacks():
                note(text)
        if self.code is None:
            return
        if copy.results:
            note(copy.describe_results())
        missing = data.left_out((*copy.files, *copy.results), copy.links, self.code)
        for text in islice(chain(missing, self._ignored(copy)), 5):
            note(text)

    def _ignored(self, copy: snapshot.Snapshot) -> Iterator[str]:
        """Yield a sentence about data beside the script that git ignores."""
        if self.code and self.code.words and copy.in_git:
            reported = (*copy.links, *data.named(self.code.words[1:], self.code))
            names = snapshot.ignored(copy.root)[:1000]
            names = [name for name in names if not snapshot.RESULTS.search(name)]
            around = {name: (Path(name), *Path(name).parents[:-1]) for name in names}
            itself = {
                at for at in chain(*around.values()) if snapshot.ignores_itself(copy.root / at)
            }
            names = [name for name in names if itself.isdisjoint(around[name])]
            if paths := data.ignored(names, reported, self.code):
                lacks = f"git ignores {listed(paths)}, so the copy will not have it"
                yield f"{lacks}; link what the script reads: --link {paths[0]}"

    def placed(self, job: Job, run: RunDir) -> Job:
        """Return the job with this Python, and with the places of the program's modules."""
        at = job.command.index("--")
        modules = [f"--modules={path}" for path in self._searched(run)]
        rest = (*job.command[1:at], *modules, *job.command[at:])
        own = self.line.own
        if own.container:
            words, srun = self._in_container(job, run)
            return replace(job, command=(*words, *rest), srun=(*job.srun, *srun), python=words)
        if own.python and self.facts.executable != sys.executable:
            words = (python.find(own.python),)
            return replace(job, command=(*words, *rest), python=words)
        return replace(job, command=(job.command[0], *rest))

    def _in_container(self, job: Job, run: RunDir) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return how a rank's Python starts in the container, and further options of srun."""
        own, image = self.line.own, self.line.own.container
        linked = [str(self.code.checkout / name) for name in self.links if self.code]
        mounts = [str(run.path.parent), *linked, *own.mount]
        interpreter = own.python or "python3"
        if slurm.is_available() and not own.local and _srun_has_pyxis():
            both = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts)
            options = (f"--container-image={image}", f"--container-mounts={both}")
            return (interpreter,), (*options, f"--container-workdir={job.directory}")
        program = next(filter(shutil.which, CONTAINER_PROGRAMS), "")
        if not program:
            problem = (
                f"--container {image}: srun has no option --container-image (the pyxis plugin), "
                f"and neither {' nor '.join(CONTAINER_PROGRAMS)} is on PATH; "
                "install Apptainer, or submit where Slurm has pyxis"
            )
            if not own.dry_run:
                raise ProgramError(problem)
            program = CONTAINER_PROGRAMS[0]
            note(f"{problem}; shown for {program}, but a submission from here would be refused")
        gpus = ["--nv"] if job.gpus else []
        places = (f"--bind={','.join(mounts)}", f"--pwd={job.directory}")
        return (program, "exec", *gpus, *places, image, interpreter), ()

    def _searched(self, run: RunDir) -> list[str]:
        if run.code.exists() and not self.line.own.new_code:  # it keeps the code that it has
            record = JobRecord.read(run.path)
            before = record.more.get("command", []) if record else []
            return [word[10:] for word in before if word.startswith("--modules=")]
        places = [run.code / path for path in self.found.inside]
        places += [run.modules(number) for number in range(len(self.found.outside))]
        # Processes that the ranks start import the program too that calls a function.
        program = self.code.words if self.code else ()
        needs_rollcall = self.found.needs_rollcall or program[:2] == CALL
        places += [run.launcher] if needs_rollcall and self.code else []
        return [str(path) for path in places]


def of(line: CommandLine, code: UserCode | None, config: Config) -> Surroundings:
    """Look at the Python that a command line names, and at what its program imports."""
    own = line.own
    if own.mount and not own.container:
        raise ProgramError("--mount: only a container needs it; add --container IMAGE")
    uses_own = bool(own.python) and not own.container
    executable = python.find(own.python) if uses_own else sys.executable
    program = code.words if code else ()
    is_call = program[:2] == CALL
    if is_call:
        words = ["-m", *program[3:]]
    elif program[:1] == ("-m",):
        words = list(program[:2])
    elif program:
        words = [os.path.abspath(program[0])]  # noqa: PTH100 - a link stays what it is
    else:
        names = [text.partition(":")[0] for _, text in named_code(config)]
        names += ["pydantic", *PACKAGES] if uses_own else []
        words = ["-m", *names] if names else []
    facts = python.ask(executable, Path.cwd(), words)
    if facts.broken and not own.container:
        is_program = bool(words) and facts.broken.startswith(f"{words[0]}:")
        other = ", or name a script of Python" if is_program and words[0][-3:] != ".py" else ""
        raise ProgramError(f"{facts.broken}; correct it{other}")
    if words[:1] == ["-m"] and not (own.container or is_call):
        _check_modules(facts, words[1:], uses_own and not program)
    if own.start_method == "torchrun" and not facts.torch and not own.container:
        raise ProgramError(f"--start-method torchrun: {facts.executable} does not have torch")
    checkout = code.checkout if code else ROOT
    linked = data.links(own.link, checkout) if own.link else ()
    found = python.imports(facts, checkout) if words else Imports((), {}, False)
    return Surroundings(line, code, facts, found, linked)


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


def _srun_has_pyxis() -> bool:
    try:
        shown = subprocess.run(["srun", "--help"], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return re.search(r"--container-image\b", shown.stdout) is not None
