"""`rollcall profile RUN`: profile a few steps of a live run, without a restart.

The ranks write a trace for Perfetto or Chrome, a flame graph of Python for speedscope, and tables,
which this command waits for and prints. The exit code is 1 if no profile came in time.
"""

import time
from collections.abc import Sequence

from rollcall.launch.runs import find, states
from rollcall.launch.runs.find import NoRunError
from rollcall.records.profile import Profile, ProfileRequest
from rollcall.refusal import RefusedError
from rollcall.run_dir import RunDir

MOST = 1000
"""The most steps of a profile: traces are large."""


def main(argv: Sequence[str]) -> int:
    """Ask for a profile, wait for it and print its tables; return the exit code."""
    words = find.parser("profile", __doc__)
    words.add_argument(
        "--steps", type=int, default=3, metavar="N", help="number of steps (default: 3)"
    )
    words.add_argument("--ranks", default="0", help="ranks, such as 0,5, or all (default: 0)")
    meaning = "seconds to wait for the profile (default: 300)"
    words.add_argument("--wait", type=float, default=300, metavar="SECONDS", help=meaning)
    options = words.parse_args(argv)
    run = find.find_one(options.run, options.root)
    _check_running(run)
    ranks = _ranks(run, options.ranks)
    if not 1 <= options.steps <= MOST:
        raise RefusedError(f"--steps {options.steps}: expected a number from 1 to {MOST}")
    before = Profile.read_all(run.path)
    request = ProfileRequest(options.steps, ranks)
    ProfileRequest.place(run.path).parent.mkdir(exist_ok=True)
    request.write(run.path)
    end = time.monotonic() + options.wait
    try:
        while time.monotonic() < end:
            time.sleep(0.5)
            found = Profile.read_all(run.path)
            new = [one for path, one in found.items() if before.get(path) != one]
            for steps in {(one.first, one.last) for one in new}:  # another may have been planned
                mine = {one.rank: one for one in new if (one.first, one.last) == steps}
                if mine.keys() >= {*ranks}:
                    print("\n".join(line for rank in ranks for line in mine[rank].lines(run.path)))
                    return 0
            _check_running(run)
    finally:
        ProfileRequest.place(run.path).unlink(missing_ok=True)
    print(f"run {run.name} wrote no profile within {options.wait:g} s: is it in a long step?")
    return 1


def _check_running(run: RunDir) -> None:
    (condition,), _ = states.look([run])
    if condition.state != "running":
        advice = "profile.steps=10:13 profiles a run from its start"
        raise NoRunError(f"run {run.name} does not run: {condition.state}; {advice}")


def _ranks(run: RunDir, text: str) -> list[int]:
    starts = run.read_events("started")
    count = starts[-1].get("world_size") if starts else None
    if not isinstance(count, int):
        raise NoRunError(f"run {run.name} cannot be profiled: no rollcall training started in it")
    if text == "all":
        return [*range(count)]
    words = text.split(",")
    if not all(word.isdecimal() and int(word) < count for word in words):
        raise RefusedError(f"--ranks {text}: expected all, or ranks up to {count - 1} as in 0,1")
    return sorted({int(word) for word in words})
