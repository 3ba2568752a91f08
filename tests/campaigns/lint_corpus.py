"""Measure lint on a folder of sbatch scripts: how often it is right, how many mistakes it finds.

`PYTHONPATH=. python tests/campaigns/lint_corpus.py FOLDER` runs lint on each script. The precision
is the share of findings that `lint_verdicts.txt` calls right, by hash of the script and rule; add
verdicts by reading the script. Then it plants known mistakes into the scripts, each a small edit
that depends only on the script. The recall is the share of planted mistakes for which lint reports
more findings of the expected rule than before.

Rules that depend on the machine are left out. `--unjudged` and `--wrong` print such findings,
`--missed` the planted mistakes that lint did not find. Exit code: 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rollcall.tools.lint import RULES, name
from rollcall.tools.lint.job import Job
from rollcall.tools.lint.model import Launch
from rollcall.tools.lint.script import Finding, Script

VERDICTS = Path(__file__).with_name("lint_verdicts.txt")
"""Lines of hash, rule and `right` or `wrong`: one verdict for all findings of a rule in a file."""
PRECISION, RECALL = 0.9, 0.8
OF_THE_MACHINE = ("output-directory", "srun-without-cpus")
MOST = 12
"""Scripts into which the same kind of mistake is planted, at most."""


@dataclass
class Result:
    """The counts of one measurement."""

    right: int = 0
    wrong: int = 0
    unjudged: int = 0
    planted: Counter[str] = field(default_factory=Counter)  # mistakes by kind
    found: Counter[str] = field(default_factory=Counter)

    @property
    def precision(self) -> float:
        """The share of the judged findings that are right."""
        return self.right / max(self.right + self.wrong, 1)

    @property
    def recall(self) -> float:
        """The share of planted mistakes that were found."""
        return self.found.total() / max(self.planted.total(), 1)


class Sample:
    """A script into which a mistake is planted."""

    def __init__(self, path: Path, text: str) -> None:
        self.script, self.lines = Script(path, text), text.split("\n")
        self.launches = [found for found in self.script.launches if found.trainings]
        self.job = Job(self.script)
        self.directives = sorted({found.line - 1 for found in self.script.directives})

    @property
    def only(self) -> Launch | None:
        """The only training, if it stands in one place, outside of functions and branches."""
        alone = len(self.launches) == 1 and not self.launches[0].blocks
        return self.launches[0] if alone and not self.launches[0].is_condition else None

    def last_line(self, launch: Launch) -> int | None:
        """Return the index of the last line of a command; None if it is not a plain one."""
        index = launch.line - 1
        while self.lines[index].rstrip().endswith("\\") and index + 1 < len(self.lines):
            index += 1
        text = "\n".join(self.lines[launch.line - 1 : index + 1])
        closed = all(text.count(quote) % 2 == 0 for quote in "'\"") and "#" not in text
        return index if closed and launch.end == "\n" else None

    def is_last(self, launch: Launch) -> bool:
        """Return True if nothing follows the command."""
        return self.script.launches[-1] is launch

    def edit(self, index: int, *lines: str) -> str:
        """Return the text with one line replaced by these."""
        return "\n".join([*self.lines[:index], *lines, *self.lines[index + 1 :]])

    def replace(self, pattern: str, value: str | Callable[[re.Match[str]], str]) -> str | None:
        """Return the text with the first match outside of comments replaced; None without one."""
        for index, line in enumerate(self.lines):
            is_code = index in self.directives or not line.lstrip().startswith("#")
            if is_code and re.search(pattern, line):
                return self.edit(index, re.sub(pattern, value, line, count=1))
        return None


Plant = Callable[[Sample], str | None]


def directive(pattern: str, value: str) -> Plant:
    """Return the edit of a directive."""
    return lambda sample: sample.replace(rf"^(#SBATCH.*){pattern}", rf"\g<1>{value}")


def appended(text: str, *lines: str) -> Plant:
    """Return the edit that writes text behind the last training, and lines below it."""

    def plant(sample: Sample) -> str | None:
        launch = sample.only
        index = sample.last_line(launch) if launch and sample.is_last(launch) else None
        if launch is None or index is None or launch.sees_failures or launch.replaces_shell:
            return None
        return sample.edit(index, sample.lines[index].rstrip() + text, *lines)

    return plant


def above(*lines: str, inserted_if: Callable[[Sample, Launch], bool]) -> Plant:
    """Return the edit that inserts lines above the only training."""

    def plant(sample: Sample) -> str | None:
        launch = sample.only
        if launch is None or not inserted_if(sample, launch):
            return None
        return sample.edit(launch.line - 1, *lines, sample.lines[launch.line - 1])

    return plant


def no_srun(sample: Sample) -> str | None:
    """Start the only step without srun."""
    launch = sample.only
    if launch is None or sample.job.nodes < 2 or launch.parts or len(sample.script.steps) != 1:
        return None
    program = launch.program[0]
    if launch.step is None or not re.match(r"(torchrun|python|accelerate|deepspeed)", program):
        return None
    line = sample.lines[launch.line - 1]
    edited = re.sub(rf"\bsrun\b.*?(?={re.escape(program)}\b)", "", line)
    return sample.edit(launch.line - 1, edited) if edited != line else None


def more_nodes(sample: Sample) -> str | None:
    """Ask for four nodes where the training is started once, in the batch shell."""
    launch = sample.only
    if (
        launch is None
        or launch.step is not None
        or sample.script.steps
        or "--nnodes" in launch.program
    ):
        return None
    if not re.match(r"(torchrun|python3?|accelerate|deepspeed)$", launch.program[0]):
        return None
    if re.search(r"\b(ray|ssh|mpirun|--hostfile)\b", sample.script.text):
        return None
    return sample.replace(r"^(#SBATCH.*(--nodes[= ]|-N ?))1\b", r"\g<1>4")


def no_wait(sample: Sample) -> str | None:
    """Remove the last wait behind trainings in the background."""
    if not any(launch.end == "&" for launch in sample.launches):
        return None
    waits = [n for n, line in enumerate(sample.lines) if re.search(r"\bwait\b", line)]
    after = [launch for launch in sample.launches if waits and launch.line > waits[0]]
    return sample.edit(waits[0]) if len(waits) == 1 and not after else None


def removed_setting(sample: Sample) -> str | None:
    """Remove set -e where another command follows the training."""
    launch = sample.only
    if launch is None or sample.is_last(launch) or launch.end != "\n":
        return None
    later = sample.script.launches[sample.script.launches.index(launch) + 1 :]
    lines = [n for n, line in enumerate(sample.lines) if re.match(r"set -\w*e", line)]
    if (
        len(lines) != 1
        or any(found.program[0] != "echo" for found in later)
        or "$?" in sample.script.text
    ):
        return None
    return sample.edit(lines[0])


def misspelled(sample: Sample) -> str | None:
    """Misspell the last use of a variable."""
    if re.search(r"(?m)^\s*(source|\.|eval)\s", sample.script.text):
        return None
    for index in range(len(sample.lines) - 1, -1, -1):
        line = sample.lines[index]
        if line.lstrip().startswith(("#", "echo", "printf")) or "'" in line:
            continue
        match = re.search(r"\$\{?([A-Za-z]\w{5,})\b(?!:)", line)
        if match and re.search(rf"(?m)^\s*(export )?{match[1]}=", sample.script.text):
            bad = match[0][:-2] + match[0][-1]
            return sample.edit(index, line[: match.start()] + bad + line[match.end() :])
    return None


def unset(sample: Sample) -> str | None:
    """Remove the assignment of a variable in lower case that a training uses."""
    if re.search(r"(?m)^\s*(source|\.|eval)\s", sample.script.text):
        return None
    for index, line in enumerate(sample.lines):
        match = re.match(r"([a-z]\w{2,})=[^(]*$", line)
        if match and line.count('"') % 2 == 0 and not line.endswith("\\"):
            others = "\n".join(sample.lines[:index] + sample.lines[index + 1 :])
            used = re.findall(rf"(?m)^\s*(?!#|echo).*\$\{{?{match[1]}\b(?!:)", others)
            if used and not re.search(rf"\b{match[1]}=|(for|read) {match[1]}\b", others):
                return sample.edit(index)
    return None


def fewer_gpus(sample: Sample) -> str | None:
    """Ask for half of the GPUs for which a launcher starts ranks."""
    trainings = [training for launch in sample.launches for training in launch.trainings]
    count = sample.job.gpus_per_node
    found = [sample.job.ranks_per_node(one) for one in trainings if one.name != "python"]
    if len(found) != 1 or not count or found[0] != count or count < 2:
        return None
    if "SLURM_GPUS" in sample.script.text or "CUDA_VISIBLE" in sample.script.text:
        return None
    return sample.replace(rf"^(#SBATCH.*gpu\S*[:= ]){count}\b", rf"\g<1>{count // 2}")


def visible(sample: Sample) -> str | None:
    """Show one GPU to a launcher of several ranks."""
    launch = sample.only
    trainings = [one for one in launch.trainings if one.name != "python"] if launch else []
    ranks = [sample.job.ranks_per_node(one) or 0 for one in trainings]
    if launch is None or max(ranks, default=0) < 2 or "CUDA_VISIBLE" in sample.script.text:
        return None
    line = sample.lines[launch.line - 1]
    return sample.edit(launch.line - 1, "export CUDA_VISIBLE_DEVICES=0", line)


def several_tasks(sample: Sample, launch: Launch) -> bool:
    """Return True if srun starts a Python program in several tasks."""
    direct = launch.training is not None and launch.training.name == "python"
    job = Job(sample.script, launch)
    return direct and launch.step is not None and (job.tasks_per_node or 0) > 1 and job.nodes > 0


def is_step(sample: Sample, launch: Launch) -> bool:
    """Return True if srun starts the training on several nodes."""
    return launch.step is not None and Job(sample.script, launch).nodes > 1


def no_count(sample: Sample) -> str | None:
    """Leave out the number of nodes of a torchrun."""
    launch = sample.only
    if launch is None or not is_step(sample, launch) or launch.trainings[0].name != "torchrun":
        return None
    return sample.replace(r"--nnodes[= ]\S+ ?", "")


def wrong_count(sample: Sample) -> str | None:
    """Give a launcher another number of nodes than the job's."""
    launch = sample.only
    if launch is None or not is_step(sample, launch):
        return None
    return sample.replace(
        r"(--nnodes|--num_machines)([= ])\S+", rf"\g<1>\g<2>{sample.job.nodes + 3}"
    )


def many_launchers(sample: Sample) -> str | None:
    """Let srun start a launcher eight times on each node."""
    launch = sample.only
    if launch is None or launch.step is None or launch.trainings[0].name == "python":
        return None
    if {"ntasks", "ntasks-per-node", "$"} & {*launch.step}:
        return None
    return sample.replace(r"^(#SBATCH.*--n?tasks-per-node[= ])1\b", r"\g<1>8")


def commented(sample: Sample) -> str | None:
    """Write a blank behind the # of a directive."""
    index = sample.directives[len(sample.directives) // 2] if sample.directives else None
    return None if index is None else sample.edit(index, "# " + sample.lines[index][1:])


def late(sample: Sample) -> str | None:
    """Write a command above the last directive."""
    if not sample.directives or len(sample.script.directives) < 2 or sample.script.late:
        return None
    index = sample.directives[-1]
    return sample.edit(index, "cd $SLURM_SUBMIT_DIR", sample.lines[index])


def misspelled_option(sample: Sample) -> str | None:
    """Leave out a letter of an option."""
    return sample.replace(
        r"^(#SBATCH +--)(ntasks|cpus|output|job|gpus|partition)(\S)", _without_a_letter
    )


def _without_a_letter(match: re.Match[str]) -> str:
    return match[1] + match[2][:1] + match[2][2:] + match[3]


def unclosed(sample: Sample) -> str | None:
    """Leave out the last quote of the script."""
    for index in range(len(sample.lines) - 1, -1, -1):
        line = sample.lines[index]
        if line.count('"') == 2 and "'" not in line and not line.lstrip().startswith("#"):
            return sample.edit(index, line[: line.rindex('"')] + line[line.rindex('"') + 1 :])
    return None


HOURS = r"(--time[= ]|-t ?)(24|48|72):00:00"
PLANTS: dict[str, tuple[Plant, tuple[str, ...]]] = {
    "memory without a unit": (
        directive(r"(--mem[= ])(\d{1,3})[Gg][Bb]?\b", r"\g<2>\g<3>"),
        ("small-memory",),
    ),
    "hours as minutes": (directive(HOURS, r"\g<2>\g<3>"), ("short-time",)),
    "hours and minutes": (
        directive(r"(--time[= ]|-t ?)0?(\d{1,2}):00:00", r"\g<2>\g<3>:00"),
        ("short-time",),
    ),
    "DOS line ends": (lambda sample: "\r\n".join(sample.lines), ("dos-line-ends",)),
    "directive as comment": (commented, ("commented-directive",)),
    "late directive": (late, ("late-directive",)),
    "misspelled option": (misspelled_option, ("unknown-option",)),
    "unclosed quote": (unclosed, ("syntax-error",)),
    "no srun": (no_srun, ("without-srun",)),
    "more nodes": (more_nodes, ("without-srun", "node-count")),
    "in the background": (appended(" &"), ("missing-wait",)),
    "wait removed": (no_wait, ("missing-wait",)),
    "echo as last command": (appended("", 'echo "Training finished"'), ("hidden-exit-code",)),
    "|| true": (appended(" || true"), ("hidden-exit-code",)),
    "pipe": (appended(" 2>&1 | tee train.log"), ("hidden-exit-code",)),
    "set -e removed": (removed_setting, ("hidden-exit-code",)),
    "misspelled variable": (misspelled, ("unset-variable",)),
    "unset variable": (unset, ("unset-variable",)),
    "fewer GPUs": (fewer_gpus, ("gpu-count",)),
    "one visible GPU": (visible, ("gpu-count",)),
    "WORLD_SIZE by hand": (
        above("export WORLD_SIZE=3", inserted_if=several_tasks),
        ("rank-by-hand",),
    ),
    "RANK by hand": (above("export RANK=0", inserted_if=several_tasks), ("rank-by-hand",)),
    "rank of the batch shell": (
        above("export NODE_RANK=$SLURM_PROCID", inserted_if=is_step),
        ("rank-in-batch-shell",),
    ),
    "localhost": (above("export MASTER_ADDR=localhost", inserted_if=is_step), ("local-address",)),
    "no --nnodes": (no_count, ("node-count",)),
    "wrong --nnodes": (wrong_count, ("node-count",)),
    "many launchers": (many_launchers, ("tasks-mismatch",)),
}
"""The edits that plant mistakes, and the rules of which one must find it."""


def findings(path: Path, text: str) -> list[tuple[str, Finding]]:
    """Return what lint finds in a script, with the rules' names."""
    script = Script(path, text)
    rules = [rule for rule in RULES if name(rule) not in OF_THE_MACHINE]
    return [(name(rule), finding) for rule in rules for finding in rule(script)]


def measure(paths: list[Path], verdicts: Path, shows: frozenset[str] = frozenset()) -> Result:
    """Return the counts for these scripts.

    Args:
        shows: what to print: `unjudged` and `wrong` findings, `missed` mistakes.
    """
    known = {
        tuple(words[:2]): words[2] for words in map(str.split, verdicts.read_text().splitlines())
    }
    result = Result()
    for path in paths:
        content = path.read_bytes()
        key, text = hashlib.sha256(content).hexdigest()[:12], content.decode()
        before = findings(path, text)
        for rule, finding in before:
            verdict = known.get((key, rule), "unjudged")
            setattr(result, verdict, getattr(result, verdict) + 1)
            if verdict in shows:
                print(f"{key} {rule} {verdict}  {path.name}:{finding.line}: {finding.reason}")
        if "syntax-error" in {rule for rule, _ in before}:
            continue  # into a script that bash cannot read nothing can be planted
        counts, sample = (
            Counter(rule for rule, _ in before),
            Sample(path, text.replace("\r\n", "\n")),
        )
        for kind, (plant, rules) in PLANTS.items():
            edited = plant(sample) if result.planted[kind] < MOST else None
            if edited is None or edited == text:
                continue
            result.planted[kind] += 1
            after = Counter(rule for rule, _ in findings(path, edited))
            if any(after[rule] > counts[rule] for rule in rules):
                result.found[kind] += 1
            elif "missed" in shows:
                print(f"missed: {kind}: {path.name}")
    return result


def main() -> int:
    """Measure the scripts of a folder; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--verdicts", type=Path, default=VERDICTS)
    parser.add_argument("--part", choices=("even", "odd"), help="half of the scripts, by hash")
    for show in ("unjudged", "wrong", "missed"):
        parser.add_argument(
            f"--{show}", dest="shows", action="append_const", const=show, default=[]
        )
    options = parser.parse_args()
    paths = [path for path in options.folder.iterdir() if path.is_file()]
    paths.sort(key=lambda path: hashlib.sha256(path.read_bytes()).hexdigest())  # mixed
    if options.part:
        parts = [int(hashlib.sha256(path.read_bytes()).hexdigest()[-1], 16) % 2 for path in paths]
        paths = [p for p, odd in zip(paths, parts, strict=True) if odd == (options.part == "odd")]
    result = measure(paths, options.verdicts, frozenset(options.shows))
    for kind, planted in result.planted.items():
        print(f"{kind:26} {result.found[kind]:4} of {planted:4}")
    print(
        f"{len(paths)} scripts: precision {result.precision:.3f} ({result.right} right, "
        f"{result.wrong} wrong, {result.unjudged} unjudged), recall {result.recall:.3f} "
        f"({result.found.total()} of {result.planted.total()})"
    )
    return int(result.precision < PRECISION or result.recall < RECALL or result.unjudged > 0)


if __name__ == "__main__":
    raise SystemExit(main())
