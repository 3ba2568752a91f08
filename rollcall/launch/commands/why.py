"""`rollcall why RUN`: explain why a run failed, with the log of the rank that caused it.

The earliest failure of the newest attempt counts; earlier restarts are listed with their causes. A
rank that only lost its peers is not the cause, even if it noticed first; its exception shows that.
If no rank failed, the cause is what a node's supervisor or Slurm reports. Times are by the nodes'
clocks.

Exit code: 0 if there is a cause or nothing to explain, 1 if the cause is unknown, 2 if there is no
such run.
"""

from collections.abc import Sequence

from rollcall.launch.runs import find, restarts, root_cause, states
from rollcall.launch.runs.evidence import storage_problem
from rollcall.records.run import noticed
from rollcall.records.run_dir import RunDir
from rollcall.system.files import tail

LINES = 20
"""Number of lines shown from the end of a log."""


def main(argv: Sequence[str]) -> int:
    """Explain the newest attempt; return the exit code."""
    options = find.parser("why", __doc__).parse_args(argv)
    run = find.find_one(options.run, options.root)
    (condition,), complaint = states.look([run])
    if condition.state in ("pending", "running", "done", "stopped", "requeue"):
        print(f"run {run.name} has not failed: {condition.state}" + _in_brackets(condition.note))
        _show_restarts(run)
        if condition.is_live and (problem := storage_problem(run)):
            print(f"  note: {problem}")
        return 0
    newest = find.newest_attempt(run)
    if newest is not None and condition.job and newest.job != condition.job.id:
        newest = None  # the newest job has not made an attempt
    cause = root_cause.find_cause(run, condition, newest)
    if cause is None:
        print(f"run {run.name}, {condition.state}: cause unknown" + _in_brackets(complaint))
    else:
        print(f"run {run.name}{f', attempt {newest.number}' if newest else ''}: {cause.what}")
        for text in filter(None, (cause.hint, cause.consequences)):
            print(f"  {text}")
        if cause.log and (lines := tail(cause.log)[-LINES:]):
            print(f"  the last lines of {cause.log}:", *lines, sep="\n  | ")
    _show_restarts(run)
    for text in noticed(run.path):
        print(f"  note: {text}")
    return 1 if cause is None else 0


def _show_restarts(run: RunDir) -> None:
    if lines := restarts.history(run):
        times = "once" if len(lines) == 1 else f"{len(lines)} times"
        print(f"  it restarted {times}:", *lines, sep="\n    ")


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""
