"""`rollcall bench startup`: measure the time from the command to the first step.

torchrun and the supervisor start the same run in turns, and torchrun a bare script; the floor is
that script with forked ranks (bare.py). With `--more`, `rollcall submit --local` takes part. A
second table compares the CPU time of `rollcall submit --dry-run` with the import of submitit.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial

from rollcall.cli.installation import TRAIN, command
from rollcall.records.run_dir import RunDir
from rollcall.tools.bench import turns

BASE = "torchrun, bare script"
SHORT = ("train.steps=1", "checkpoint.every=null")
"""Settings of a run that consists almost entirely of its start."""


def main(argv: Sequence[str]) -> int:
    """Measure and print the tables; return the exit code."""
    words = turns.parser("startup", __doc__)
    words.add_argument("--nproc-per-node", type=turns.count, default=4, metavar="K")
    words.add_argument("--more", action="store_true", help="also start with submit --local")
    words.add_argument("words", nargs="*", metavar="[recipe] [key=value ...]")
    options = words.parse_args(argv)
    count, repeats = options.nproc_per_node, options.repeats
    ranks = f"--nproc-per-node={count}"

    def trained(*start: str) -> Callable[[RunDir], list[str]]:
        return lambda run: [*start, *options.words, *SHORT, *run.words]

    starts: dict[str, Callable[[RunDir], list[str]]] = {
        BASE: lambda run: turns.torchrun(*turns.BARE, str(run.path), "1", ranks=count),
        "torchrun -m train": trained(*turns.torchrun(*TRAIN, ranks=count)),
        "supervisor": trained(*command("supervise", ranks), "--", *TRAIN),
        "bare script, forked": lambda run: turns.bare(run, 1, count),
    }
    if options.more:
        local = command("submit", "--local", "--wait", ranks)
        starts["submit --local"] = trained(*local, "digits")
    with tempfile.TemporaryDirectory() as folder:

        def measure(name: str, number: int) -> turns.Figures:
            run = RunDir(folder, f"{name.replace(' ', '')}-{number}")
            start = time.time()
            cpu = turns.timed(starts[name](run))["CPU"]
            first = [line["time"] for line in run.read_events("first_step")]
            if not first:
                raise turns.BenchError(f"{name}: the run ended without a first step")
            return {"to first step": first[0] - start, "CPU": cpu}

        found = turns.take_turns({name: partial(measure, name) for name in starts}, repeats)
    title = f"command to first step, {count} ranks, medians of {repeats}, in turns"
    turns.compare(title, found, BASE)
    dry = {
        "import submitit": [sys.executable, "-c", "import submitit"],
        "import of the schema": [sys.executable, "-c", "import submitit, rollcall.config.schema"],
        "submit --dry-run": [*command("submit", "--dry-run")],
    }
    ways = {
        name: partial(lambda words, _: turns.timed(words), words) for name, words in dry.items()
    }
    print()
    title = f"a dry run, medians of {3 * repeats}, in turns"
    turns.compare(title, turns.take_turns(ways, 3 * repeats), "import submitit")
    return 0
