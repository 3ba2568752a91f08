"""`rollcall logs RUN`: show the output of the ranks, one rank's log or several merged.

The default is rank 0 of the newest attempt. --node and --merge show several ranks, line by line in
the order of time, with the rank before each line. The logs have no time stamps: once a second, the
supervisors record the size of each log, by the clock of its node. The lines that a rank wrote
within that second stay together.
"""

import os
import sys
import time
from collections.abc import Sequence
from itertools import chain, starmap
from pathlib import Path

from rollcall.launch.runs import find, output, states
from rollcall.launch.runs.find import NoRunError
from rollcall.messages.text import coloured
from rollcall.records.run_dir import RunDir
from rollcall.system.files import MOST_LINE, open_regular
from rollcall.system.timer import Every

COLOURS = ("36", "33", "32", "35", "34", "31", "96", "93", "92", "95", "94", "91")
"""ANSI colours of the prefixes, by rank."""


def main(argv: Sequence[str]) -> int:
    """Show the logs; return the exit code."""
    parser = find.parser("logs", __doc__)
    add = parser.add_argument
    add("--rank", type=int, metavar="R", help="show this rank (default: 0)")
    add("--node", type=int, metavar="N", help="show all ranks of this node")
    add("--attempt", type=int, metavar="A", help="show this attempt (default: the newest)")
    add("--merge", action="store_true", help="show all ranks of all nodes")
    add("--follow", action="store_true", help="continue until the run is over, with later attempts")
    options = parser.parse_args(argv)
    run = find.find_one(options.run, options.root)
    view = _View(run, options.rank, options.node, options.merge)
    attempt = _newest(run) if options.attempt is None else options.attempt
    if options.follow:
        _follow(run, view, attempt, stays=options.attempt is not None)
    else:
        view.show(attempt)
        view.finish()
    return 0


class _View:
    def __init__(self, run: RunDir, rank: int | None, node: int | None, merge: bool) -> None:
        self.run = run
        self.node = "*" if node is None else str(node)
        several = rank is None and (merge or node is not None)
        self.rank = "*" if several else str(rank or 0)
        self.prefix = several
        self._shown: dict[Path, int] = {}
        self._cut: dict[Path, bytes] = {}
        self._unreadable: set[Path] = set()

    def files(self, attempt: int) -> list[Path]:
        logs = self.run.attempt_logs(attempt)
        paths = output.logs_in(logs, f"node-{self.node}/rank-{self.rank}.log")
        return sorted(filter(self._is_readable, paths), key=output.rank_of)

    def _is_readable(self, path: Path) -> bool:
        if os.access(path, os.R_OK) and path.is_file():
            return True
        if path not in self._unreadable:
            print(f"logs: note: {path} cannot be read; left out", file=sys.stderr)
            self._unreadable.add(path)
        return False

    def show(self, attempt: int) -> None:
        """Print an attempt's logs, merged by time; raise NoRunError if they do not exist."""
        files = self.files(attempt)
        if not files:
            raise NoRunError(self._missing(attempt))
        by_node: dict[Path, list[Path]] = {}
        for path in files:
            by_node.setdefault(path.parent, []).append(path)
        parts = chain.from_iterable(starmap(output.parts, by_node.items()))
        # Sorting is stable: parts with the same time stay in the order of their log.
        for part in sorted(parts, key=lambda part: (part.time, part.rank)):
            self._print(part.path, part.start, part.end)

    def add(self, attempt: int) -> None:
        for path in self.files(attempt):
            self._print(path, self._shown.get(path, 0), path.stat().st_size)

    def finish(self) -> None:
        """Print the last lines, which have no line end yet."""
        for path, line in self._cut.items():
            if line:
                self._line(path, line + b"\n")
        self._cut.clear()
        sys.stdout.flush()

    def _print(self, path: Path, start: int, end: int) -> None:
        if end <= start:
            return
        with open_regular(path) as file:
            file.seek(start)
            while start < end and (text := file.read(min(end - start, 1 << 20))):
                start += len(text)
                *lines, cut = (self._cut.pop(path, b"") + text).split(b"\n")
                for line in lines:
                    self._line(path, line + b"\n")
                if len(cut) >= MOST_LINE:  # a binary file has no line ends
                    self._line(path, cut)
                self._cut[path] = cut if len(cut) < MOST_LINE else b""
        self._shown[path] = end
        sys.stdout.flush()

    def _line(self, path: Path, line: bytes) -> None:
        is_terminal = sys.stdout.isatty()
        if is_terminal:  # of what a progress bar has overwritten, show the end
            line = line.rstrip(b"\r\n").rpartition(b"\r")[2] + b"\n"
        if self.prefix:
            rank = output.rank_of(path)
            prefix = coloured(f"[rank {rank}]", COLOURS[rank % len(COLOURS)])
            line = prefix.encode() + b" " + line
        if is_terminal:
            print(line.decode(errors="replace"), end="")
        else:
            sys.stdout.buffer.write(line)

    def _missing(self, attempt: int) -> str:
        logs = self.run.attempt_logs(attempt)
        if not output.logs_in(logs.parent, "attempt-*/node-*/rank-*.log"):
            return f"run {self.run.name} has no logs yet: rollcall status {self.run.name}"
        nodes = output.nodes_of_ranks(logs)
        if not nodes:
            newest = _newest(self.run)
            return f"run {self.run.name} has no attempt {attempt}; the newest is {newest}"
        has = f"ranks 0 to {max(nodes)} on nodes 0 to {max(nodes.values())}"
        return f"attempt {attempt} of run {self.run.name} has no such log; it has {has}"


def _newest(run: RunDir) -> int:
    return max(0, run.next_attempt() - 1)


def _follow(run: RunDir, view: _View, attempt: int, stays: bool) -> None:
    if view.files(attempt):
        view.show(attempt)
    state_check, is_over = Every(5.0), False
    while not is_over:
        if state_check.is_due():
            is_over = not states.look([run])[0][0].is_live  # asked before the last look at the logs
        if not stays and _newest(run) > attempt:
            view.add(attempt)
            attempt = _newest(run)
        view.add(attempt)
        time.sleep(0 if is_over else 0.5)
    view.finish()
    if not view.files(attempt):
        raise NoRunError(f"run {run.name} has ended without a log: rollcall why {find.typed(run)}")
