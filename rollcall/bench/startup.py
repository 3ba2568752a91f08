"""`rollcall bench startup`: measure the time from the command to the first step.

torchrun and the supervisor start the same run in turns, so that other load affects both. With
`--more`, they also take turns with `rollcall submit --local`.
"""

import tempfile
import time
from collections.abc import Sequence
from functools import partial

from rollcall.bench import turns
from rollcall.installation import TRAIN, command
from rollcall.run_dir import RunDir
from rollcall.text import word

SHORT = ("train.steps=1", "checkpoint.every=null")
"""Settings of a run that consists almost entirely of its start."""


def main(argv: Sequence[str]) -> int:
    """Measure and print the table; return the exit code."""
    words = turns.parser("startup", __doc__)
    words.add_argument("--nproc-per-node", type=turns.count, default=4, metavar="K")
    words.add_argument("--more", action="store_true", help="also start with submit --local")
    words.add_argument("words", nargs="*", metavar="[recipe] [key=value ...]")
    options = words.parse_args(argv)
    count, repeats = options.nproc_per_node, options.repeats
    ranks = f"--nproc-per-node={count}"
    starts = {
        "torchrun": turns.torchrun(*TRAIN, ranks=count),
        "supervisor": [*command("supervise", ranks), "--", *TRAIN],
    }
    if options.more:
        starts["submit --local"] = [*command("submit", "--local", "--wait", ranks), "digits"]
    with tempfile.TemporaryDirectory() as folder:

        def measure(name: str, number: int) -> turns.Figures:
            run = RunDir(folder, f"{name.replace(' ', '')}-{number}")
            place = [word("run.name", run.name), word("run.root", folder)]
            start = time.time()
            cpu = turns.timed([*starts[name], *options.words, *SHORT, *place])["CPU"]
            first = [line["time"] for line in run.read_events("first_step")]
            if not first:
                raise turns.BenchError(f"{name}: the run ended without a first step")
            return {"to first step": first[0] - start, "CPU": cpu}

        found = turns.take_turns({name: partial(measure, name) for name in starts}, repeats)
    title = f"command to first step, {count} ranks, medians of {repeats}, in turns"
    turns.compare(title, found, "torchrun")
    return 0
