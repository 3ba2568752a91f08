"""What may stand on submit.py's command line? Its own options, and sbatch's as they are.

What rollcall must understand, it reads here; every other option of sbatch is passed on unread.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from launch import slurm
from launch.job import RANKS_WITHOUT_GPU

EXAMPLES = """\
any other option of sbatch is passed on as it stands: --account --qos --constraint --reservation
--exclude --nodelist --dependency --mail-user --exclusive --gres ...; sbatch's letters work too:
-N 2 -c 8 -t 2:00:00 -p gpu -A account -J name ...

examples:
  submit.py                                      the default recipe, on one node
  submit.py --nodes 2 --gpus-per-node 4 --time 2:00:00 mnist optim.lr=3e-4
  submit.py --nodes 2 -- script.py --flag        a torchrun script of your own, as it is
  submit.py --nodes 2 -- -m package.module --flag
  submit.py --local --nodes 2 --wait             two simulated nodes on this machine
  submit.py --nodes 2-8 mnist                    as many as are free, and on when one is lost
  submit.py --nodes 2 --name mine                submit it again to continue where it stopped
"""
OURS_INSTEAD = {
    "ntasks": "there is one task per node, which starts that node's ranks: say --nodes and "
    "--nproc-per-node",
    "output": "a run keeps its output in its directory: say --root",
    "chdir": "a run works in the copy of its code",
    "wrap": "say `-- script.py` or `-- -m module`",
    "test-only": "say --dry-run",
}
OURS_INSTEAD |= dict.fromkeys(("ntasks-per-node", "tasks-per-node"), OURS_INSTEAD["ntasks"])
OURS_INSTEAD |= dict.fromkeys(("error", "open-mode"), OURS_INSTEAD["output"])
OURS_INSTEAD |= dict.fromkeys(("parsable", "quiet", "verbose", "version", "usage"), "leave it away")
"""Options of sbatch that would take a run apart, and what to say in their place."""


class OptionError(ValueError):
    """An option or value that neither submit.py nor sbatch takes; the message says what fits."""


class CommandLine(NamedTuple):
    """submit.py's words, taken apart.

    Attributes:
        own: what submit.py itself reads.
        passed: options of sbatch by name; None for one without a value.
        program: what follows `--`; empty for the built-in training.
    """

    own: argparse.Namespace
    passed: dict[str, str | None]
    program: tuple[str, ...]


def read(argv: Sequence[str]) -> CommandLine:
    """Take a command line apart.

    Raises:
        OptionError: an option that nobody knows or that would take a run apart, or a value that
            does not fit.
        SystemExit: --help has been answered.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    parser = _parser()
    rest, passed = _pass_on(argv[:end], parser)
    own = parser.parse_args(rest)
    if "--" in argv and not argv[end + 1 :]:
        parser.error("nothing follows `--`: a script or -m module is expected there")
    if "--" in argv and own.words:
        parser.error(f"'{own.words[0]}' and a program behind `--`: a run has one of them")
    _check_combinations(own, passed)
    return CommandLine(own, passed, tuple(argv[end + 1 :]))


def _check_combinations(own: argparse.Namespace, passed: Mapping[str, str | None]) -> None:
    if "array" in passed and (own.wait or own.chain > 1):
        raise OptionError("--array: --wait and --chain are for a single run, not for an array")
    for option in ("array", "chain"):
        if own.local and (option in passed or getattr(own, option, 1) > 1):
            raise OptionError(
                f"--{option}: Slurm queues jobs; a run on this machine (--local) is one"
            )
    if own.local and own.spares:
        raise OptionError("--spares: a run on this machine (--local) has no other hosts")
    least, most = own.nodes
    if least < most and (own.local or own.spares):
        other = "a run on this machine (--local)" if own.local else "a run with --spares"
        raise OptionError(f"--nodes {least}-{most}: {other} has a fixed number of nodes")


def _pass_on(
    argv: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[list[str], dict[str, str | None]]:
    """Divide the words into those for `parser` and options of sbatch."""
    rest: list[str] = []
    passed: dict[str, str | None] = {}
    words = iter(argv)
    for word in map(_spelt_out, words):
        name, has_value, value = word.partition("=")
        if not word.startswith("--") or name in parser._option_string_actions:
            rest.append(word)
            continue
        # Here, because few command lines need it.
        from launch.lint.options import FLAGS, WITH_VALUE

        option = name[2:]
        if option in OURS_INSTEAD:
            raise OptionError(f"{name}: {OURS_INSTEAD[option]}")
        if option in FLAGS:
            passed[option] = value if has_value else None
        elif option not in WITH_VALUE:
            known = {*FLAGS, *WITH_VALUE, *(key[2:] for key in parser._option_string_actions)}
            raise OptionError(
                f"{name}: neither submit.py nor sbatch has it{_nearest(option, known)}"
            )
        else:
            given = value if has_value else next(words, None)
            if given is None:
                raise OptionError(f"{name}: a value is expected behind it")
            passed[option] = given
    return rest, passed


def _spelt_out(word: str) -> str:
    """An option of one letter under its long name: `--nodes=2` for `-N2`."""
    if not word.startswith("-") or word.startswith("--") or word == "-h":
        return word
    from launch.lint.options import SHORT

    long = SHORT.get(word[1:2])
    if long is None:
        return word
    return f"--{long}={word[2:]}" if word[2:] else f"--{long}"


def _nearest(word: str, known: set[str]) -> str:
    import difflib

    match = difflib.get_close_matches(word, sorted(known), 1)
    return f", did you mean --{match[0]}?" if match else " (--help lists what there is)"


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong, so that it can be told with the file in which it stands."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message.removeprefix('argument ')} (--help lists all options)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="submit.py",
        description="Start a run on Slurm where there is one, otherwise on this machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="submit.py [options] [recipe] [key=value ...]\n"
        "       submit.py [options] -- script.py|-m module [arguments ...]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    nodes = "hosts (default: 1); MIN-MAX: as many as there are, and on with those that are left"
    add("--nodes", type=span, default=(1, 1), metavar="N", help=nodes)
    spares = "further hosts of the job that wait and take the place of one that is lost"
    add("--spares", type=_whole, default=0, metavar="N", help=spares)
    again = "how often failed ranks start again (default: training as long as it gets on, a script "
    add("--max-restarts", type=_whole, metavar="N", help=f"{again}0)")
    ranks = f"ranks on each node (default: one per GPU, {RANKS_WITHOUT_GPU} where there is none)"
    add("--nproc-per-node", type=_positive, metavar="K", help=ranks)
    add("--gpus-per-node", type=_positive, metavar="G", help="GPUs on each node (default: none)")
    cpus = "CPUs for each node's ranks together (default: one per rank)"
    add("--cpus-per-task", type=_positive, metavar="C", help=cpus)
    add("--mem", help="memory on each node, such as 64G")
    add("--time", type=_time, help=f"time limit: {slurm.TIME_FORMATS}")
    add("--partition", metavar="P", help="(default: the site's)")
    add("--srun-arg", action="append", default=[], metavar="=--OPTION", help="passed on to srun")
    site = "defaults from clusters/NAME.yaml and ~/.config/rollcall/clusters/NAME.yaml"
    add("--cluster", metavar="NAME", help=site)
    discover = "write a profile of this cluster to ~/.config/rollcall/clusters/, and end"
    add("--discover", action="store_true", help=discover)
    name = "name of the run (default: recipe or script, date and time)"
    add("--name", "--job-name", metavar="RUN", help=name)
    add("--root", metavar="DIR", help="directory that holds the runs (default: runs)")
    start = "fork: one import for all ranks (default); torchrun: an interpreter for each"
    add("--start-method", choices=("fork", "torchrun"), help=start)
    chain = "queue N jobs of the run, each after the one before; they end at once when it is done"
    add("--chain", type=_positive, default=1, metavar="N", help=chain)
    resume = "continue a run that has failed, or a finished one that is asked for more"
    add("--resume", action="store_true", help=resume)
    new_code = "let a run that goes on take the code of now; what it had stays as code-0, ..."
    add("--new-code", action="store_true", help=new_code)
    add("--local", action="store_true", help="start on this machine, also where Slurm is")
    add("--dry-run", action="store_true", help="print the script and the code; write nothing")
    add("--wait", action="store_true", help="show the output until the end; exit as the run does")
    add("words", nargs="*", metavar="[recipe] [key=value ...]", help="as for python -m train")
    return parser


def span(text: str) -> tuple[int, int]:
    """A number of nodes, or the least and the most, as in `2-8`.

    Raises:
        ArgumentTypeError: it is neither.
    """
    least, dash, most = text.partition("-")
    found = _positive(least), _positive(most if dash else least)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text}: MIN-MAX is expected, the smaller number first")
    return found


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a whole number from 0 on is expected, not '{text}'")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on is expected, not '{text}'")
    return int(text)


def _time(text: str) -> str:
    try:
        slurm.seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
