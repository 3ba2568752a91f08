"""`rollcall watch [RUN …]`: show a run, or the table of `rollcall status`, until `q` or Ctrl-C.

For one run, it shows the attempt and its ranks, the loss of the last logged steps, the newest
validation, the time left, the phases of a step, the age of the last sign of life, and failures,
restarts and lost steps as soon as they happen.
"""

import textwrap
import time
from collections.abc import Sequence
from math import inf, nan

from rollcall.launch.commands import status
from rollcall.launch.runs import find, restarts, root_cause, states
from rollcall.messages.text import clock, duration, figure
from rollcall.records.attempt import AttemptEvent, AttemptRecord, Heartbeat, RankFailure
from rollcall.records.job import Restart
from rollcall.records.phases import Phases
from rollcall.records.run import LoggedStep
from rollcall.records.run_dir import RunDir
from rollcall.system.files import as_object, changed, listed, tail
from rollcall.system.hosts import fold

BARS = "▁▂▃▄▅▆▇█"
TITLE = 12
"""Width of the first column, in characters."""
EVENTS = 6
"""Most failures, restarts and rollbacks that are shown, the newest."""


def main(argv: Sequence[str]) -> int:
    """Show the run or the table until it is interrupted; return the exit code."""
    options = find.parser("watch", __doc__, nargs="*").parse_args(argv)
    runs = [find.find(word, options.root) for word in options.run]
    if len(runs) != 1 or find.is_sweep(runs[0]):
        status.keep_live(lambda width: status.lines(options.run, options.root, width))
        return 0
    run = runs[0]
    status.keep_live(lambda width: [line[:width] for line in lines(run, width)], lambda: _news(run))
    return 0


def _news(run: RunDir) -> list[float]:
    """Return when the files with failures, restarts and the end were changed."""
    paths = [run.events, run.verdict, run.path / AttemptEvent.FILE, run.path / Restart.FILE]
    return [*map(changed, [*paths, *listed(run.attempt_logs(run.next_attempt() - 1), "node-*")])]


def lines(run: RunDir, width: int) -> list[str]:
    """Return the lines about a run, for a terminal of this width in characters."""
    (condition,), complaint = states.look([run])
    progress = states.progress(run, condition)
    newest = find.newest_attempt(run)
    rows = [("run", f"{find.typed(run)}, {condition.state}{_stage(run, condition)}")]
    if newest is not None:
        rows.append(("attempt", f"{newest.number}: {newest.ranks} ranks on {fold(newest.hosts)}"))
    if progress.step is not None:
        rows.append(("step", _bar(progress.step, progress.total, width)))
    room = max(1, min(60, width - TITLE - 10))
    steps = LoggedStep.last(run.path)[-room:]
    if losses := [step.loss for step in steps]:
        rows.append(("loss", f"{losses[-1]:<9.4g} {sparkline(losses)}"))
        known = [loss for loss in losses if abs(loss) < inf] or [nan]
        between = f"{figure(min(known))} to {figure(max(known))}"
        rows.append(("", f"{between}, steps {steps[0].step:,} to {steps[-1].step:,}"))
    figures = ", ".join(f"{name} {value:.4g}" for name, value in progress.validation.items())
    rows += [("validation", figures)] if figures else []
    if progress.rate is not None:
        left = f", {progress.left} left" if progress.left else ""
        rows.append(("speed", f"{progress.rate:,.0f} samples/s{left if condition.is_live else ''}"))
    if (phases := Phases.newest(run.path)) is not None:
        rows.append(("step time", _phases(phases)))
    sign = max(changed(run.metrics), changed(run.events), Heartbeat.newest(run.path))
    if sign:
        rows.append(("last sign", f"{max(0.0, time.time() - sign):.0f} s ago"))
    rows += [("note", text) for text in (condition.note, complaint) if text]
    rows += zip(("events", *[""] * EVENTS), _events(run, condition, newest)[-EVENTS:], strict=False)
    shown = []
    for title, text in rows:
        first, *more = textwrap.wrap(text, max(status.MIN_NOTE, width - TITLE))
        shown += [f"{title:<{TITLE}}{first}", *(" " * TITLE + part for part in more)]
    return shown


def sparkline(values: Sequence[float]) -> str:
    """Return a bar for each value, scaled to the range of all; a space for NaN and infinities."""
    known = [value for value in values if abs(value) < inf]
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    bars = {value: BARS[round((value - low) * scale)] for value in known}
    return "".join(bars.get(value, " ") for value in values)


def _stage(run: RunDir, condition: states.Condition) -> str:
    """Say that a running run makes no steps at the moment; empty if it does."""
    names = [event.get("event") for event in map(as_object, tail(run.events)) if event]
    newest = [name for name in names if name in ("started", "first_step", "failed")][-1:]
    if condition.state != "running" or newest in ([], ["first_step"]):
        return ""
    return ", starting: no step yet" if newest == ["started"] else ", restarting after a failure"


def _phases(line: Phases) -> str:
    """Return the mean time of a step by phase, and the rank that is slowest without waiting."""
    mean = {name: sum(times) / max(len(times), 1) for name, times in line.phases.items()}
    total = max(sum(mean.values()), 1e-12)
    busy = [times for name, times in line.phases.items() if name != "communication"]
    of_rank = [sum(times) for times in zip(*busy, strict=False)]
    parts = ", ".join(f"{name} {part / total:.0%}" for name, part in mean.items())
    slowest = f"; slowest rank {of_rank.index(max(of_rank))}" if len(of_rank) > 1 else ""
    return f"{duration(line.seconds)}: {parts}{slowest}"


def _events(run: RunDir, condition: states.Condition, newest: AttemptRecord | None) -> list[str]:
    """Return a line about each failure, restart and rollback, in order."""
    lines = [(line.time, str(line)) for line in Restart.read(run.path)]
    failures = RankFailure.of_attempt(run.attempt_logs(newest.number)) if newest else []
    if failures and newest and not any(time > newest.started for time, _ in lines):
        cause = root_cause.find_cause(run, states.Condition(condition.state), newest)
        # Without the failure behind it, a node may not have written everything yet.
        what = cause.what if cause and cause.failure else "a rank has failed"
        lines.append((failures[0].time, what))
    for attempt in find.attempts(run)[1:]:
        lines.append((attempt.started, f"attempt {attempt.number} started"))
    for back in restarts.rollbacks(run):
        lost = f"{back.reached - back.step:,} steps lost"
        lines.append((back.time, f"back from step {back.reached:,} to {back.step:,}: {lost}"))
    return [f"{clock(at)[11:]} {text}" for at, text in sorted(lines)]


def _bar(step: int, total: int | None, width: int) -> str:
    if not total:
        return f"{step:,}"
    done = min(max(step / total, 0), 1)
    room = min(40, max(0, width - 50))
    full = round(done * room)
    return f"{step:,} of {total:,}  {'█' * full}{'░' * (room - full)}  {done:.0%}"
