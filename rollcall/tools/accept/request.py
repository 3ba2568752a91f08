"""The words of `rollcall accept` after `--`: which checks, and with what. No torch."""

from collections.abc import Sequence
from typing import NamedTuple, get_args

from rollcall.cli.parser import parser as command_parser
from rollcall.config import Config, parse
from rollcall.messages.refusal import RefusedError

HALVES = "mesh={}=2,replicate=rest"
STRATEGIES: dict[str, tuple[int, Sequence[str]]] = {
    **{name: (1, [f"strategy={name}"]) for name in ("ddp", "zero1", "zero2", "zero3")},
    "hsdp": (4, ["strategy=hsdp", "mesh=replicate=2,shard=rest"]),
    "tensor": (2, [HALVES.format("tensor")]),
    "pipeline": (2, [HALVES.format("pipeline")]),
    "split": (2, ["strategy=split", HALVES.format("pipeline")]),
    "context": (2, [HALVES.format("context")]),
    "sequence": (2, [HALVES.format("tensor"), "sequence_parallel=true"]),
    "zero3 and tensor": (4, ["mesh=shard=rest,tensor=2"]),
}
"""By name: the number of ranks that must divide the world, and the keys of `parallel`."""
CHECKS = (
    *("machine", "network", "bandwidth"),
    *(f"strategy {name}" for name in STRATEGIES),
    *("kill and resume", "exact mode", "memory", "overhead"),
)
"""The names of all checks, in their order."""


class Request(NamedTuple):
    """A selection of the checks."""

    checks: list[str]
    device: str
    words: list[str]  # `key=value`, for every training


def read(words: Sequence[str]) -> Request:
    """Parse the words.

    Raises:
        RefusedError: a check or a key does not exist.
        SystemExit: an option does not exist.
    """
    made = command_parser("accept ... --", None)
    first = "only checks whose names begin with one of these, separated by commas"
    made.add_argument("--only", default="", metavar="CHECK,…", help=f"{first}: {', '.join(CHECKS)}")
    kinds = get_args(Config.model_fields["device"].annotation)
    made.add_argument("--device", default="auto", choices=kinds, help="(default: auto)")
    made.add_argument("words", nargs="*", metavar="key=value", help="for every training")
    options = made.parse_args(words)
    firsts = [first.strip() for first in options.only.split(",")] if options.only else [""]
    for first in firsts if options.only else []:
        if not first or not any(name.startswith(first) for name in CHECKS):
            raise RefusedError(f"--only {options.only}: '{first}' is none of {', '.join(CHECKS)}")
    parse(["digits", *options.words])
    chosen = [name for name in CHECKS if name.startswith(tuple(firsts))]
    return Request(chosen, options.device, options.words)
