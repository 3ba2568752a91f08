"""`rollcall goodput RUN`: show how a run spent its time, over all its attempts and jobs.

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
from rollcall.messages.text import duration, table


def main(argv: Sequence[str]) -> int:
    """Print the table; return the exit code."""
    parser = find.parser("goodput", __doc__)
    parser.add_argument("--json", action="store_true", help="print the same as a JSON object")
    options = parser.parse_args(argv)
    run = find.find_one(options.run, options.root)
    shares = goodput(run, states.look([run])[0][0])
    if shares is None:
        raise NoRunError(f"run {run.name} has not started yet: rollcall status {find.typed(run)}")
    if options.json:
        print(json.dumps({**asdict(shares), "goodput": shares.productive}))
        return 0
    until = "until now" if shares.is_live else "to its end"
    counts = f"attempts: {shares.attempts}; steps done again: {shares.repeated_steps}"
    share = f"goodput {shares.productive:.1%} of" if run.metrics.exists() else "no logged step in"
    print(f"run {run.name}: {share} {duration(shares.wall)} {until}; {counts}")
    rows = [
        (name, f"{seconds / (shares.wall or 1):.1%}", duration(seconds), SHARES[name])
        for name, seconds in shares.shares.items()
        if seconds > shares.wall / 2000
    ]
    print("\n".join(table(rows)))
    return 0
