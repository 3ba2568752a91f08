"""`rollcall goodput RUN`: show what became of a run's time, over all its attempts and jobs.

The shares add up to the wall clock from the submission to the end, or to now for a live run. They
come from the run's records alone. Only steps that count are productive: of a step that was done
twice, only once. `--json` prints seconds.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rollcall.launch.runs import find, states
from rollcall.launch.runs.find import NoRunError
from rollcall.launch.runs.goodput import SHARES, goodput
from rollcall.text import duration, table


def main(argv: Sequence[str]) -> int:
    """Print the table; return the exit code."""
    parser = find.parser("goodput", __doc__)
    parser.add_argument("--json", action="store_true", help="print the same as a JSON object")
    options = parser.parse_args(argv)
    run = find.find_one(options.run, options.root)
    found = goodput(run, states.look([run])[0][0])
    if found is None:
        raise NoRunError(f"run {run.name} has not started yet: rollcall status {find.typed(run)}")
    if options.json:
        print(json.dumps({**asdict(found), "goodput": found.productive}))
        return 0
    until = "until now" if found.is_live else "to its end"
    counts = f"attempts: {found.attempts}; steps done again: {found.repeated_steps}"
    share = f"{found.productive:.1%} of {duration(found.wall)} {until}"
    print(f"run {run.name}: goodput {share}; {counts}")
    rows = [
        (name, f"{seconds / (found.wall or 1):.1%}", duration(seconds), SHARES[name])
        for name, seconds in found.shares.items()
        if seconds > found.wall / 2000
    ]
    print("\n".join(table(rows)))
    return 0
