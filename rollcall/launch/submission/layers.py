"""Where options come from: a cluster's profile, SBATCH_* variables, the command line.

As for sbatch, a variable replaces a default, and an option on the command line replaces both.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

from rollcall.launch.scheduler import gpus, slurm
from rollcall.launch.scheduler.sbatch_options import ENVIRONMENT, FLAGS, ONE_OF
from rollcall.launch.submission import options, profile
from rollcall.launch.submission.options import CommandLine, alternatives
from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import note


def read(argv: Sequence[str], source: str = "command line") -> tuple[CommandLine, tuple[str, ...]]:
    """Parse a command line after the options of other places; return also the profile's setup."""
    asked = options.asked(argv)
    if "help" in asked or "-h" in takewhile("--".__ne__, argv):
        return options.read(argv), ()
    layers: list[tuple[str, list[str]]] = []
    setup: tuple[str, ...] = ()
    is_job = slurm.is_available() and "local" not in asked
    name = asked.get("cluster") or (profile.DEFAULT if is_job and profile.has_default() else None)
    if name:
        loaded, setup = profile.load(name)
        layers.append((f"profile {name}", list(loaded)))
    if is_job:
        layers += [(name, [word]) for name, word in _variables(os.environ)]
    kept: list[str] = []
    origins = dict.fromkeys(map(_plain, asked), source)
    if gpus.of_resources(asked.get("gres", "")):
        origins.setdefault("gpus", source)
    for place, words in reversed(layers):
        free = [word for word in words if not any(map(origins.get, _rivals(word)))]
        origins |= dict.fromkeys(map(_name, free), place)
        if any(map(_is_gres_of_gpus, free)):
            origins["gpus"] = place
        kept = [*free, *kept]
    return options.read([*kept, *argv])._replace(origins=origins), setup


def _variables(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each variable of sbatch that is set, and its option as a word of the command line."""
    for variable, name in ENVIRONMENT.items():
        value = env.get(variable, "")
        if not value:
            continue
        if name in alternatives() or name == "job-name":
            advice = alternatives().get(name, "the job has the name of the run; use --name")
            note(f"{variable} has no effect: {advice}")
            continue
        word = f"--{name}" if name in FLAGS and name != "exclusive" else f"--{name}={value}"
        try:
            options.read([word])
        except RefusedError as error:
            raise RefusedError(f"{variable}: {error}") from None
        yield variable, word


def _rivals(word: str) -> set[str]:
    """Return the options that replace this one if they come from a place that counts more."""
    if (name := _name(word)) in options.LISTS:
        return set()
    also = "gpus" if _is_gres_of_gpus(word) else name
    return {name}.union(*(group for group in ONE_OF if also in group))


def _is_gres_of_gpus(word: str) -> bool:
    name, _, value = word.partition("=")
    return name == "--gres" and bool(gpus.of_resources(value))


def _name(word: str) -> str:
    return _plain(word.partition("=")[0])


def _plain(name: str) -> str:
    name = name.removeprefix("--")
    return "job-name" if name == "name" else name
