"""The command line of `rollcall submit`: own options, and sbatch options that it passes on."""

import argparse
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import islice, pairwise, takewhile
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from rollcall.cli.parser import plain
from rollcall.config import yaml_values
from rollcall.config.refusals import about_option, synonyms
from rollcall.launch.frameworks import TABLE, roles
from rollcall.launch.program.find import STARTERS
from rollcall.launch.scheduler import cluster, gpus, sbatch_options, slurm
from rollcall.launch.scheduler.sbatch_options import FLAGS, SHORT, WITH_VALUE, did_you_mean
from rollcall.messages.refusal import RefusedError

_TABLE: dict[str, Any] = yaml_values.table(__file__, "options.yaml")
OPTIONS: dict[str, str] = _TABLE["options"]
"""Each option of rollcall's own, with the name of its value, and its help."""
OF_GROUP = ("nodes", "nproc_per_node", "gpus_per_node", "cpus_per_task", "mem", "partition")
"""Own options that each group of nodes may have; sbatch's are passed on for each."""
OF_KIND = ("nodelist", "nodefile", "constraint", "gres")
"""Options of sbatch that say which nodes a group gets: as in Slurm, the next group has its own."""
DISTRIBUTIONS = r"block|cyclic|plane|arbitrary|\*"
"""How a value of sbatch's -m begins; Python's -m has the name of a module."""


def span(text: str) -> tuple[int, int]:
    """Parse a number of nodes or a range such as `2-8`, else raise ArgumentTypeError."""
    least, dash, most = text.partition("-") if text[:1] != "-" else (text, "", "")
    found = _positive(least), _positive(most if dash else least)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"expected MIN-MAX, the smaller one first, not '{text}'")
    return found


def _whole(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        expected = f"expected a whole number of at least {least}"
        raise argparse.ArgumentTypeError(f"{expected}, not '{text}'")
    return int(text)


_positive = partial(_whole, least=1)


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


def _memory(text: str) -> str:
    if not re.fullmatch(r"\d+[KMGT]?B?", text, re.IGNORECASE | re.ASCII):
        expected = "expected a number with K, M (the default), G or T, such as 64G"
        raise argparse.ArgumentTypeError(f"{expected}, not '{text}'")
    return text


LISTS = ("srun-arg", "sbatch-arg", "mount", "link", "teardown")
"""Options of which all values count."""
TYPES: Mapping[str, Callable[[str], object]] = {
    **{"nodes": span, "spares": _whole, "max-restarts": _whole, "cpus-per-task": _positive},
    **{"gpus-per-node": _checked(gpus.of_option), "time": _checked(slurm.seconds), "mem": _memory},
    **{"python": _placed, "container": _placed, "mount": _mount},
    **{"chain": _positive, "roles": _checked(roles.of_ranks)},
}
CHOICES = {"start-method": ("fork", "torchrun"), "framework": tuple(TABLE)}
DEFAULTS = {"nodes": (1, 1), "spares": 0, "chain": 1} | {name: [] for name in LISTS}
NAMES = {name for names in OPTIONS for name in names.split() if name[:2] == "--"} | {"--help"}
SWITCHES = {usage for usage in OPTIONS if " " not in usage and usage[2:] not in CHOICES}
SWITCHES.add("--help")
"""The names of all these options, and of those without a value."""
PASSED = {f"--{name}" for name in FLAGS | WITH_VALUE}


class CommandLine(NamedTuple):
    """A parsed command line."""

    own: argparse.Namespace  # the options that rollcall reads
    passed: dict[str, str | None]  # sbatch options by name; None for an option without a value
    program: tuple[str, ...]  # the words after `--`; empty for the built-in training
    origins: Mapping[str, str] = MappingProxyType({})  # of each option, without dashes
    groups: "tuple[CommandLine, ...]" = ()  # what each group of nodes asks for, the first one first


def asked(argv: Sequence[str]) -> dict[str, str]:
    """Return the options that the words before `--` name, and their values; nothing is checked."""
    found: dict[str, str] = {}
    words = map(_long_form, argv[: argv.index("--")] if "--" in argv else argv)
    for word in takewhile(lambda word: word != ":", words):
        name, has_value, value = word.removeprefix("--sbatch-arg=").partition("=")
        if name.startswith("--"):
            found[name[2:]] = value if has_value or not _takes_value(name) else next(words, "")
    return found


def read(argv: Sequence[str]) -> CommandLine:
    """Parse a command line; raise RefusedError at a wrong option, SystemExit after --help."""
    end = argv.index("--") if "--" in argv else len(argv)
    if ":" in argv[:end]:
        return _read_groups(argv[:end], argv[end:])
    parser = _parser()
    _refuse_forgotten_dashes(argv[:end])
    rest, passed = _pass_on(argv[:end])
    own = parser.parse_intermixed_args(rest)
    program = tuple(argv[end + 1 :])
    if "--" in argv and not program:
        parser.error("expected a script or -m module after `--`")
    if program and own.words:
        advice = "--resume takes no value, --name RUN names it" if own.resume else "remove one"
        parser.error(f"got both '{own.words[0]}' and a program after `--`; {advice}")
    _check_combinations(own, passed)
    return CommandLine(own, passed, program)


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


def _refuse_forgotten_dashes(argv: Sequence[str]) -> None:
    """Raise RefusedError with the right command line if a script stands where a recipe belongs."""
    quoted = next((word for word in argv if word.partition(" ")[0] in STARTERS), "")
    words = [word for word in argv if word != "--wrap"]
    argv = [part for word in words for part in (word.split() if word == quoted else [word])]
    for place, (before, word) in enumerate(pairwise(("", *argv))):
        after = "".join(argv[place + 1 : place + 2])
        is_module = word == "-m" and not re.match(DISTRIBUTIONS, after)
        is_script = word.endswith(".py") and not word.startswith("-") and "=" not in word
        if (is_module or is_script) and not _takes_value(_long_form(before)):
            what = "-m starts a module" if is_module else f"{word} is a script, not a recipe"
            first = next((at for at in range(place) if argv[at] in STARTERS), place)
            command = shlex.join(["rollcall", "submit", *argv[:first], "--", *argv[place:]])
            raise RefusedError(f"{what}; put `--` before it: {command}")


def _takes_value(option: str) -> bool:
    return option in NAMES - SWITCHES if option in NAMES else option[2:] in WITH_VALUE


def _check_combinations(own: argparse.Namespace, passed: Mapping[str, str | None]) -> None:
    is_here = own.local or not slurm.is_available()
    if is_here and (wrong := sbatch_options.wrong_value(passed)):
        raise RefusedError(wrong)
    if "array" in passed and (own.wait or own.chain > 1):
        raise RefusedError("--array: --wait and --chain work with a single run only")
    if own.in_allocation and (own.local or own.spares or own.chain > 1 or "array" in passed):
        raise RefusedError("--in-allocation: remove --local, --spares, --chain or --array")
    if own.local and own.chain > 1:
        raise RefusedError("--chain: a run on this machine is one job; remove --chain or --local")
    if own.local and own.spares:
        raise RefusedError("--spares: a run on this machine has none; remove --spares or --local")
    if own.json and not own.doctor:
        raise RefusedError("--json: only --doctor prints JSON here")
    least, most = own.nodes
    if own.roles and (own.words or own.start_method == "torchrun"):
        raise RefusedError("--roles: needs a script after `--`, and --start-method fork")
    if own.roles and not own.nproc_per_node:
        share, more = divmod(len(roles.of_ranks(own.roles)), most)
        own.nproc_per_node = ",".join(str(share + (node < more)) for node in range(most))
    if least < most and (own.local or own.spares or own.roles):
        other = "a run with --roles" if own.roles else "a run with --spares"
        other = "a run on this machine (--local)" if own.local else other
        advice = f"has a fixed number of nodes; write --nodes {most}"
        raise RefusedError(f"--nodes {least}-{most}: {other} {advice}")


@cache
def alternatives() -> dict[str, str]:
    """Return sbatch options that conflict with how rollcall runs jobs, and what to use instead."""
    return {name: text for them, text in synonyms()["sbatch"].items() for name in them.split()}


def _pass_on(argv: Sequence[str]) -> tuple[list[str], dict[str, str | None]]:
    rest: list[str] = []
    passed: dict[str, str | None] = {}
    words = iter(argv)
    for word in map(_long_form, words):
        name, has_value, value = word.partition("=")
        if value == "--":  # argparse of Python 3.11 would raise ValueError
            raise RefusedError(f"{name}: expected a value, not '--'")
        if name == "--sbatch-arg":
            word = value if has_value else next(words, "")
            name, has_value, value = word.partition("=")  # as if it were given directly
            if not re.fullmatch(r"--\w[\w-]*", name):
                expected = "expected --OPTION or --OPTION=VALUE"
                raise RefusedError(f"--sbatch-arg: {expected}, not '{word}'")
            if name not in NAMES | PASSED:  # of a plugin
                passed[name[2:]] = value if has_value else None
                continue
        if not word.startswith("--") or name in NAMES:
            rest.append(word)
            continue
        given = value if has_value else None
        if _needs_value(name, word, words) and not has_value:
            given = next(words, None)
            if given is None:
                raise RefusedError(f"{name}: expected a value")
        passed[name[2:]] = given
    return rest, passed


def _needs_value(name: str, word: str, later: Iterator[str]) -> bool:
    """Whether an option of sbatch needs a value; RefusedError if it cannot be passed on."""
    option = name[2:]
    if option in alternatives():
        raise RefusedError(f"{name}: {alternatives()[option]}")
    if name in PASSED:
        return option in WITH_VALUE
    of_site = cluster.options_of_site() if slurm.is_available() else {}
    if option in of_site:
        return of_site[option]
    own, words = [known[2:] for known in sorted(NAMES)], [word, *islice(later, 1)]
    hint = "" if about_option(words, 1.0) else did_you_mean(option, own)
    if not hint and (advice := about_option(words)):
        raise RefusedError(f"{name}: not an option of rollcall submit or of sbatch; {advice}")
    hint = hint or f"; pass an option of a plugin on with --sbatch-arg={name}"
    for other, text in alternatives().items():  # which would be refused, too
        hint = f"; instead of --{other}: {text}" if f"'--{other}'" in hint else hint
    raise RefusedError(f"{name}: not an option of rollcall submit or of sbatch{hint}")


def _long_form(word: str) -> str:
    """Return a short option in its long form, `--nodes=2` for `-N2`, and others as spelled here."""
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        name = name.replace("_", "-")
        name = _TABLE["spellings"].get(name, name)
        return f"--{name}{equals}{value}" if f"--{name}" in NAMES | PASSED else word
    if not word.startswith("-") or word == "-h":
        return word
    long = SHORT.get(word[1:2])
    if long is None:
        return word
    return f"--{long}={word[2:]}" if word[2:] else f"--{long}"


class _Parser(argparse.ArgumentParser):
    """Raises errors instead of exiting, so that a profile's file can be added to the message."""

    def error(self, message: str) -> NoReturn:
        of_sbatch = "; expected an option of rollcall submit or of sbatch"
        hint = of_sbatch if message.startswith("unrecognized") else ""
        raise RefusedError(f"{plain(message)}{hint} (--help lists the options)")


@cache
def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rollcall submit",
        description="Start a run on Slurm, or on this machine if it has no Slurm.",
        epilog=_TABLE["examples"],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="rollcall submit [options] [recipe] [key=value ...]\n"
        "       rollcall submit [options] -- script.py|-m module [arguments ...]",
        allow_abbrev=False,
    )
    for usage, meaning in OPTIONS.items():
        *names, metavar = usage.split() if " " in usage else (usage, None)
        name = names[0][2:]
        how: dict[str, Any] = {"metavar": metavar, "type": TYPES.get(name)}
        how["default"] = DEFAULTS.get(name)
        if usage in SWITCHES:
            how = {"action": "store_true"}
        elif name in CHOICES:
            how = {"choices": CHOICES[name]}
        elif name in LISTS:
            how["action"] = "append"
        parser.add_argument(*names, help=meaning, **how)
    words = "[recipe] [key=value ...]"
    parser.add_argument("words", nargs="*", metavar=words, help="as for rollcall train")
    return parser
