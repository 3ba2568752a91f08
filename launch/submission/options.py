"""The command line of `rollcall submit`: own options, and sbatch options that it passes on."""

import argparse
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, NoReturn

from rollcall.launch.frameworks import TABLE
from rollcall.launch.program.find import STARTERS
from rollcall.launch.scheduler import cluster, gpus, slurm
from rollcall.launch.scheduler.job import RANKS_WITHOUT_GPU
from rollcall.launch.scheduler.sbatch_options import FLAGS, SHORT, WITH_VALUE, did_you_mean
from rollcall.refusal import RefusedError

EXAMPLES = """\
Other sbatch options are passed on unchanged: --account --qos --constraint --reservation --exclude
--nodelist --dependency --mail-user --exclusive --gres ... Short options work too: -N 2 -c 8
-t 2:00:00 -p gpu -A account -J name ...

examples:
  rollcall submit                                the default recipe, on one node
  rollcall submit --nodes 2 --gpus-per-node 4 --time 2:00:00 mnist optim.lr=3e-4
  rollcall submit --nodes 2 -- script.py --flag  your own torchrun script, unmodified
  rollcall submit --nodes 2 -- -m package.module --flag
  rollcall submit --local --nodes 2 --wait       two simulated nodes on this machine
  rollcall submit --nodes 2-8 mnist              2 to 8 nodes, whichever are free or survive
  rollcall submit --nodes 2 --name mine          submit it again to continue where it stopped
  rollcall submit --gpus-per-node 4 : --nodes 2 --gpus-per-node 8 -- script.py
                                                 groups of nodes: one with 4 GPUs, two with 8
"""
ALTERNATIVES = {
    "ntasks ntasks-per-node tasks-per-node": (
        "one task per node starts that node's ranks; use --nodes and --nproc-per-node"
    ),
    "output error open-mode": "a run keeps its output in its directory; use --root",
    "chdir": "a run works in the copy of its code; remove this option",
    "wrap": "use `-- script.py` or `-- -m module`",
    "test-only": "use --dry-run",
    "parsable quiet verbose version usage": "remove this option",
    "gpus-per-socket ntasks-per-gpu": "use --gpus-per-node",
}
ALTERNATIVES = {name: text for names, text in ALTERNATIVES.items() for name in names.split()}
"""sbatch options that conflict with how rollcall runs jobs, and what to use instead."""


OF_GROUP = ("nodes", "nproc_per_node", "gpus_per_node", "cpus_per_task", "mem", "partition")
"""Own options that each group of nodes may have; sbatch's are passed on for each."""
OF_KIND = ("nodelist", "nodefile", "constraint", "gres")
"""Options of sbatch that say which nodes a group gets: as in Slurm, the next group has its own."""
DISTRIBUTIONS = r"block|cyclic|plane|arbitrary|\*"
"""How a value of sbatch's -m begins; Python's -m has the name of a module."""


class CommandLine(NamedTuple):
    """A parsed command line."""

    own: argparse.Namespace  # the options that rollcall reads
    passed: dict[str, str | None]  # sbatch options by name; None for an option without a value
    program: tuple[str, ...]  # the words after `--`; empty for the built-in training
    given: tuple[str, ...]  # the names of all options, with dashes
    origins: Mapping[str, str] = MappingProxyType({})  # of each option, without dashes
    groups: "tuple[CommandLine, ...]" = ()  # what each group of nodes asks for, the first one first


def read(argv: Sequence[str]) -> CommandLine:
    """Parse a command line; raise RefusedError at a wrong option, SystemExit after --help."""
    end = argv.index("--") if "--" in argv else len(argv)
    if ":" in argv[:end]:
        return _read_groups(argv[:end], argv[end:])
    parser = _parser()
    _refuse_forgotten_dashes(argv[:end], parser)
    rest, passed = _pass_on(argv[:end], parser)
    own = parser.parse_intermixed_args(rest)
    program = tuple(argv[end + 1 :])
    if "--" in argv and not program:
        parser.error("expected a script or -m module after `--`")
    if program and own.words:
        parser.error(f"got both '{own.words[0]}' and a program after `--`; a run has only one")
    _check_combinations(own, passed)
    # A value cannot begin with two dashes: argparse would have refused it.
    given = [word.partition("=")[0] for word in rest if word.startswith("--")]
    return CommandLine(own, passed, program, (*given, *(f"--{name}" for name in passed)))


def _read_groups(argv: Sequence[str], program: Sequence[str]) -> CommandLine:
    """Parse the options of groups of nodes, which `:` separates as in sbatch's own command line."""
    ends = [place for place, word in enumerate(argv) if word == ":"]
    base, parts = argv[: ends[0]], pairwise([*ends, len(argv)])
    first, *_ = groups = [read([*base, *program])]
    for start, end in parts:
        own = argv[start + 1 : end]
        line, asked = read([*base, *own, *program]), read(own).passed
        passed = {it: text for it, text in line.passed.items() if it not in OF_KIND or it in asked}
        groups.append(line._replace(passed=passed))
    for line in groups:
        for name, value in vars(line.own).items():
            if name not in OF_GROUP and value != getattr(first.own, name):
                what = "recipe, key=value" if name == "words" else f"--{name.replace('_', '-')}"
                raise RefusedError(f"{what}: for all nodes alike; write it before the first `:`")
        if line.own.nodes[0] < line.own.nodes[1]:
            raise RefusedError("--nodes MIN-MAX: groups of nodes have fixed numbers of nodes")
    of_one = ("in-allocation", "spares", "preflight", "doctor")
    given = [it for it in of_one if getattr(first.own, it.replace("-", "_"))]
    if given or "array" in first.passed:
        raise RefusedError(f"--{(given or ['array'])[0]}: takes one group of nodes, not several")
    return first._replace(groups=tuple(groups))


def _refuse_forgotten_dashes(argv: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raise RefusedError with the right command line if a script stands where a recipe belongs."""
    for place, (before, word) in enumerate(pairwise(("", *argv))):
        after = "".join(argv[place + 1 : place + 2])
        is_module = word == "-m" and not re.match(DISTRIBUTIONS, after)
        is_script = word.endswith(".py") and not word.startswith("-") and "=" not in word
        if (is_module or is_script) and not _is_value_of(_long_form(before), parser):
            what = "-m starts a module" if is_module else f"{word} is a script, not a recipe"
            first = next((at for at in range(place) if argv[at] in STARTERS), place)
            command = shlex.join(["rollcall", "submit", *argv[:first], "--", *argv[place:]])
            raise RefusedError(f"{what}; put `--` before it: {command}")


def _is_value_of(option: str, parser: argparse.ArgumentParser) -> bool:
    """Whether the word after this one is its value."""
    own = parser._option_string_actions.get(option)
    return option[2:] in WITH_VALUE if own is None else own.nargs != 0


def _check_combinations(own: argparse.Namespace, passed: Mapping[str, str | None]) -> None:
    if "array" in passed and (own.wait or own.chain > 1):
        raise RefusedError("--array: --wait and --chain work with a single run only")
    if own.in_allocation and (own.local or own.spares or own.chain > 1 or "array" in passed):
        raise RefusedError("--in-allocation: remove --local, --spares, --chain or --array")
    if own.local and own.chain > 1:
        raise RefusedError("--chain: needs Slurm; a run on this machine (--local) is a single job")
    if own.local and own.spares:
        raise RefusedError("--spares: a run on this machine (--local) has no spare nodes")
    if own.json and not own.doctor:
        raise RefusedError("--json: only --doctor prints JSON here")
    least, most = own.nodes
    if least < most and (own.local or own.spares):
        other = "a run on this machine (--local)" if own.local else "a run with --spares"
        raise RefusedError(f"--nodes {least}-{most}: {other} has a fixed number of nodes")


def _pass_on(
    argv: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[list[str], dict[str, str | None]]:
    rest: list[str] = []
    passed: dict[str, str | None] = {}
    words = iter(argv)
    for word in map(_long_form, words):
        name, has_value, value = word.partition("=")
        if value == "--":  # argparse of Python 3.11 would raise ValueError
            raise RefusedError(f"{name}: expected a value, not '--'")
        known = (option[2:] for option in parser._option_string_actions if option[2:])
        if name == "--sbatch-arg" and value[2:].partition("=")[0] in {*known, *FLAGS, *WITH_VALUE}:
            word = value  # as if it were given directly
            name, has_value, value = word.partition("=")
        if not word.startswith("--") or name in parser._option_string_actions:
            rest.append(word)
            continue
        given = value if has_value else None
        if _takes_value(name, parser) and not has_value:
            given = next(words, None)
            if given is None:
                raise RefusedError(f"{name}: expected a value")
        passed[name[2:]] = given
    return rest, passed


def _takes_value(name: str, parser: argparse.ArgumentParser) -> bool:
    """Whether an option of sbatch needs a value; RefusedError if it cannot be passed on."""
    option = name[2:]
    if option in ALTERNATIVES:
        raise RefusedError(f"{name}: {ALTERNATIVES[option]}")
    if option in FLAGS or option in WITH_VALUE:
        return option in WITH_VALUE
    of_site = cluster.options_of_site() if slurm.is_available() else {}
    if option in of_site:
        return of_site[option]
    own = [known[2:] for known in parser._option_string_actions]
    hint = did_you_mean(option, own) or f"; pass an option of a plugin on with --sbatch-arg={name}"
    raise RefusedError(f"{name}: not an option of rollcall submit or of sbatch{hint}")


def _long_form(word: str) -> str:
    """Return a short option in its long form: `--nodes=2` for `-N2`."""
    if not word.startswith("-") or word.startswith("--") or word == "-h":
        return word
    long = SHORT.get(word[1:2])
    if long is None:
        return word
    return f"--{long}={word[2:]}" if word[2:] else f"--{long}"


class _Parser(argparse.ArgumentParser):
    """Raises errors instead of exiting, so that a profile's file can be added to the message."""

    def error(self, message: str) -> NoReturn:
        raise RefusedError(f"{message.removeprefix('argument ')} (--help lists the options)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rollcall submit",
        description="Start a run on Slurm, or on this machine if it has no Slurm.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="rollcall submit [options] [recipe] [key=value ...]\n"
        "       rollcall submit [options] -- script.py|-m module [arguments ...]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    nodes = "number of nodes (default: 1); MIN-MAX uses all free nodes up to MAX"
    add("--nodes", type=span, default=(1, 1), metavar="N", help=nodes)
    spares = "further nodes of the job, which replace nodes that are lost"
    add("--spares", type=_whole, default=0, metavar="N", help=spares)
    restarts = "how often failed ranks restart (default: training until it makes no progress, your "
    add("--max-restarts", type=_whole, metavar="N", help=f"{restarts}own script never)")
    ranks = f"ranks on each node (default: one per GPU, or {RANKS_WITHOUT_GPU} without GPUs)"
    add("--nproc-per-node", metavar="K", help=f"{ranks}; 4,8,8 for different nodes")
    gpu = "GPUs on each node, also as TYPE:G (default: none)"
    add("--gpus-per-node", type=_checked(gpus.of_option), metavar="G", help=gpu)
    cpus = "CPUs on each node, for all its ranks (default: the share of a node that goes with its "
    cpus += "GPUs; one per rank without GPUs)"
    add("--cpus-per-task", type=_positive, metavar="C", help=cpus)
    add("--mem", help="memory on each node, such as 64G")
    add("--time", type=_checked(slurm.seconds), help=f"time limit: {slurm.TIME_FORMATS}")
    add("--partition", metavar="P", help="Slurm partition (default: the cluster's)")
    srun = "an option of srun; may be repeated"
    add("--srun-arg", action="append", default=[], metavar="=--OPTION", help=srun)
    sbatch = "an option of sbatch that only this cluster knows; may be repeated"
    add("--sbatch-arg", type=_plugin, action="append", default=[], metavar="=--OPTION", help=sbatch)
    after = "a shell line to run when the ranks have ended, on the first node; may be repeated"
    add("--teardown", action="append", default=[], metavar="LINE", help=after)
    site = "take defaults from clusters/NAME.yaml and ~/.config/rollcall/clusters/NAME.yaml"
    add("--cluster", metavar="NAME", help=site)
    discover = "write a profile of this cluster to ~/.config/rollcall/clusters/ and exit; "
    discover += "--dry-run prints it"
    add("--discover", action="store_true", help=discover)
    name = "name of the run (default: recipe or script, date and time)"
    add("--name", "--job-name", metavar="RUN", help=name)
    add("--root", metavar="DIR", help="directory of the runs (default: runs)")
    python = "interpreter of the ranks, or its virtual or conda environment (default: this one)"
    add("--python", type=_placed, metavar="PATH", help=python)
    image = "run the ranks in a container: pyxis if srun has it, else Apptainer"
    add("--container", type=_placed, metavar="IMAGE", help=image)
    mount = "a further directory that the container sees; may be repeated"
    add("--mount", type=_mount, action="append", default=[], metavar="PATH[:INSIDE]", help=mount)
    link = "link this file or directory into the copy of the code instead of copying it; repeatable"
    add("--link", action="append", default=[], metavar="PATH", help=link)
    start = "fork: one import for all ranks (default); torchrun: an interpreter for each rank"
    add("--start-method", choices=("fork", "torchrun"), help=start)
    framework = "variables for the ranks of your script (default: by its imports)"
    add("--framework", choices=tuple(TABLE), help=framework)
    chain = "queue N jobs of the run, each after the one before; they end at once if it is done"
    add("--chain", type=_positive, default=1, metavar="N", help=chain)
    resume = "continue a run that has failed, or a finished one with more train.steps"
    add("--resume", action="store_true", help=resume)
    new_code = "resume with the current code; keep the previous copy as code-0, code-1, ..."
    add("--new-code", action="store_true", help=new_code)
    add("--local", action="store_true", help="run on this machine, even if it has Slurm")
    host = "submit on another machine, by ssh; status, logs and the others take it too"
    add("--host", metavar="HOST", help=host)
    command = "how rollcall is called there (default: $ROLLCALL_HOST_COMMAND, or rollcall)"
    add("--host-command", metavar="COMMAND", help=command)
    held = "run in the allocation of this salloc shell, and show the output"
    add("--in-allocation", action="store_true", help=held)
    add("--dry-run", action="store_true", help="print the script and the code; write nothing")
    doctor = "check the nodes that the job would get, print a table and start nothing"
    add("--doctor", action="store_true", help=doctor)
    add("--json", action="store_true", help="with --doctor: print JSON")
    preflight = "check the nodes before each start: use spares for bad ones, avoid them later"
    add("--preflight", action="store_true", help=preflight)
    wait = "show the output until the run ends; exit with its exit code"
    add("--wait", action="store_true", help=wait)
    add("words", nargs="*", metavar="[recipe] [key=value ...]", help="as for rollcall train")
    return parser


def span(text: str) -> tuple[int, int]:
    """Parse a number of nodes or a range such as `2-8`, else raise ArgumentTypeError."""
    least, dash, most = text.partition("-")
    found = _positive(least), _positive(most if dash else least)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"expected MIN-MAX, the smaller one first, not '{text}'")
    return found


def _whole(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        expected = f"expected a whole number of at least {least}"
        raise argparse.ArgumentTypeError(f"{expected}, not '{text}'")
    return int(text)


def _positive(text: str) -> int:
    return _whole(text, 1)


def _checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """Return a type for argparse: a text that a function accepts; its ValueError says why not."""

    def same(text: str) -> str:
        try:
            check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return same


def _placed(text: str) -> str:
    """Return the absolute path of what exists here: what uses it may work in another directory."""
    exists = os.path.exists(text)  # noqa: PTH110 - Path raises if it may not look
    return os.path.abspath(text) if exists else text  # noqa: PTH100 - keeps links


def _mount(text: str) -> str:
    place, colon, inside = text.partition(":")
    return _placed(place) + colon + inside


def _plugin(text: str) -> str:
    if not re.fullmatch(r"--\w[\w-]*(=.*)?", text, re.DOTALL):
        raise argparse.ArgumentTypeError(f"expected --OPTION or --OPTION=VALUE, not '{text}'")
    return text
