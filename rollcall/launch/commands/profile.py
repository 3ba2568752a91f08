"""`rollcall profile RUN`: profile a few steps of a live run, without a restart.

The ranks write a trace for Perfetto or Chrome, and tables, which this command waits for and prints.
The exit code is 1 if no profile came in time.
"""

import time
from collections.abc import Sequence

from rollcall.launch.runs import find, states
from rollcall.launch.runs.find import NoRunError
from rollcall.messages.refusal import RefusedError
from rollcall.records.profile import ProfileRequest, RankProfile
from rollcall.records.run_dir import RunDir

MAX_STEPS = 1000  # traces are large


def main(argv: Sequence[str]) -> int:
    """Ask for a profile, wait for it and print its tables; return the exit code."""
    parser = find.parser("profile", __doc__)
    add = parser.add_argument
    add("--steps", type=int, default=3, metavar="N", help="number of steps (default: 3)")
    add("--ranks", default="0", help="ranks, such as 0,5, or all (default: 0)")
    patience = "seconds to wait for the profile (default: 300)"
    add("--wait", type=float, default=300, metavar="SECONDS", help=patience)
    options = parser.parse_args(argv)
    run = find.find_one(options.run, options.root)
    _check_running(run)
    ranks = _ranks(run, options.ranks)
    if not 1 <= options.steps <= MAX_STEPS:
        raise RefusedError(f"--steps {options.steps}: expected a number from 1 to {MAX_STEPS}")
    before = RankProfile.read_all(run.path)
    request = ProfileRequest(options.steps, ranks)
    ProfileRequest.path_in(run.path).parent.mkdir(exist_ok=True)
    request.write(run.path)
    end = time.monotonic() + options.wait
    try:
        while time.monotonic() < end:
            time.sleep(0.5)
            by_steps: dict[tuple[int, int], dict[int, RankProfile]] = {}
            for path, profile in RankProfile.read_all(run.path).items():
                if before.get(path) != profile:  # another profile may have been planned
                    by_steps.setdefault((profile.first, profile.last), {})[profile.rank] = profile
            for of_rank in by_steps.values():
                if of_rank.keys() >= {*ranks}:
                    for rank in ranks:
                        print("\n".join(of_rank[rank].lines(run.path)))
                    return 0
            _check_running(run)
    finally:
        ProfileRequest.path_in(run.path).unlink(missing_ok=True)
    print(f"run {run.name} wrote no profile within {options.wait:g} s: is it in a long step?")
    return 1


def _check_running(run: RunDir) -> None:
    (condition,), _ = states.look([run])
    if condition.state != "running":
        advice = "to profile it from the start, set profile.steps=10:13"
        raise NoRunError(f"run {run.name} is not running: {condition.state}; {advice}")


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
