"""`rollcall watch [RUN …]`: show a run, or the table of `rollcall status`, live until Ctrl-C.

Of one run it shows the loss of the last logged steps, the newest validation, the time left, the use
of this machine if the run is on it, and how old the last sign of life is.
"""

import csv
import socket
import subprocess
import textwrap
import time
from collections.abc import Iterator, Sequence

from rollcall.launch.commands import status
from rollcall.launch.runs import find, states
from rollcall.records.attempt import Heartbeat
from rollcall.records.files import changed
from rollcall.records.run import LoggedStep
from rollcall.run_dir import RunDir
from rollcall.text import size

BARS = "▁▂▃▄▅▆▇█"
MOST = 60
"""Steps in the curve of the loss."""
TITLE = 12
"""Characters of the first column."""
GPU = ("index", "utilization.gpu", "memory.used", "memory.total")


def main(argv: Sequence[str]) -> int:
    """Show the run or the table until it is interrupted; return the exit code."""
    options = find.parser("watch", __doc__, nargs="*").parse_args(argv)
    runs = [find.find(word, options.root) for word in options.run]
    if len(runs) != 1 or find.is_sweep(runs[0]):
        return status.show(options.run, options.root, is_live=True)
    status.keep_live(lambda width: [line[:width] for line in lines(runs[0], width)])
    return 0


def lines(run: RunDir, width: int) -> list[str]:
    """Return what is known of a run, for a terminal of this many characters."""
    (condition,), complaint = states.look([run])
    progress = states.progress(run)
    rows = [("run", f"{find.typed(run)}, {condition.state}")]
    if progress.step is not None:
        rows.append(("step", _bar(progress.step, progress.total, width)))
    room = max(1, min(MOST, width - TITLE - 10))
    losses = [step.loss for step in LoggedStep.last(run.path)][-room:]
    if losses:
        rows.append(("loss", f"{losses[-1]:<9.4g} {sparkline(losses)}"))
    figures = ", ".join(f"{name} {value:.4g}" for name, value in progress.validation.items())
    rows += [("validation", figures)] if figures else []
    if progress.rate is not None:
        left = f", {status.clock(progress.left)} left" if progress.left else ""
        rows.append(("speed", f"{progress.rate:,.0f} samples/s{left if condition.is_live else ''}"))
    newest = find.newest_attempt(run)
    if condition.is_live and (newest is None or socket.gethostname() in newest.hosts):
        rows += _machine()
    sign = max(changed(run.metrics), changed(run.events), Heartbeat.newest(run.path))
    if sign:
        rows.append(("last sign", f"{max(0.0, time.time() - sign):.0f} s ago"))
    rows += [("note", text) for text in (condition.note, complaint) if text]
    shown = []
    for title, text in rows:
        first, *more = textwrap.wrap(text, max(status.NOTE, width - TITLE))
        shown += [f"{title:<{TITLE}}{first}", *(" " * TITLE + part for part in more)]
    return shown


def sparkline(values: Sequence[float]) -> str:
    """Return a bar for each value, between the least and the greatest; a space for what is none."""
    known = [value for value in values if abs(value) < float("inf")]
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    bars = {value: BARS[round((value - low) * scale)] for value in known}
    return "".join(bars.get(value, " ") for value in values)


def _bar(step: int, total: int | None, width: int) -> str:
    if not total:
        return f"{step:,}"
    done = min(max(step / total, 0), 1)
    room = min(40, max(0, width - 50))
    full = round(done * room)
    return f"{step:,} of {total:,}  {'█' * full}{'░' * (room - full)}  {done:.0%}"


def _machine() -> Iterator[tuple[str, str]]:
    """Yield the use of this machine's processors, memory and GPUs."""
    import psutil

    memory = psutil.virtual_memory()
    used = f"{size(memory.total - memory.available)} of {size(memory.total)} memory"
    yield "cpu", f"{psutil.cpu_percent(0.1):.0f}% of {psutil.cpu_count()} cores, {used}"
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU)}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return  # without GPUs of NVIDIA
    for row in csv.reader(said.stdout.splitlines(), skipinitialspace=True):
        if len(row) == len(GPU):
            number, busy, full, whole = row
            yield f"gpu {number}", f"{busy}%, {full} of {whole} MiB memory"
