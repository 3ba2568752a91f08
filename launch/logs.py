"""`python -m launch logs RUN`: what the ranks have printed, one rank's log or several merged.

Without options: rank 0 of the newest attempt. --node and --merge show several ranks, line by line
in the order of time, each line with its rank before it. The logs themselves have no time stamps;
the supervisors note beside them, once a second, how far each has grown, by the clock of its node.
Within that second the lines of a rank stay together.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launch import runs, stamps, states
from launch.runs import NoRunError
from train.run import RunDir

LOOK = 0.5
"""Seconds between two looks at the logs while following."""
ASK_EVERY = 5.0
"""Seconds between two questions whether the run is over."""
COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)
"""ANSI colours of the prefixes, by rank."""


def main(argv: Sequence[str]) -> int:
    """Show the logs; return the exit code."""
    parser = runs.parser("logs", __doc__)
    add = parser.add_argument
    add("--rank", type=int, metavar="R", help="this rank (default: 0)")
    add("--node", type=int, metavar="N", help="all ranks of this node")
    add("--attempt", type=int, metavar="A", help="default: the newest")
    add("--merge", action="store_true", help="all ranks of all nodes")
    add("--follow", action="store_true", help="go on until the run is over, later attempts too")
    options = parser.parse_args(argv)
    try:
        run = runs.find(options.run, options.root)
        view = View(run, options.rank, options.node, options.merge)
        attempt = _newest(run) if options.attempt is None else options.attempt
        if not options.follow:
            view.show(attempt)
            view.finish()
            return 0
        return _follow(run, view, attempt, stays=options.attempt is not None)
    except NoRunError as error:
        return runs.refuse("logs", error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return 0


class View:
    """The logs that are asked for, and how far they have been shown."""

    def __init__(self, run: RunDir, rank: int | None, node: int | None, merge: bool) -> None:
        self.run = run
        self.node = "*" if node is None else str(node)
        several = rank is None and (merge or node is not None)
        self.rank = "*" if several else str(rank or 0)
        self.prefix = several
        self._shown: dict[Path, int] = {}
        self._cut: dict[Path, bytes] = {}

    def files(self, attempt: int) -> list[Path]:
        """The logs that are there."""
        place = self.run.path / "logs" / f"attempt-{attempt}"
        return sorted(place.glob(f"node-{self.node}/rank-{self.rank}.log"), key=stamps.rank_of)

    def show(self, attempt: int) -> None:
        """Print an attempt's logs, merged by time.

        Raises:
            NoRunError: there are none.
        """
        files = self.files(attempt)
        if not files:
            raise NoRunError(self._missing(attempt))
        by_node: dict[Path, list[Path]] = {}
        for path in files:
            by_node.setdefault(path.parent, []).append(path)
        parts = [part for folder, paths in by_node.items() for part in stamps.parts(folder, paths)]
        # Sorting is stable: what has the same time stays in the order of its log.
        for part in sorted(parts, key=lambda part: (part.time, part.rank)):
            self._print(part.path, part.start, part.end)

    def add(self, attempt: int) -> None:
        """Print what has been written since the last time."""
        for path in self.files(attempt):
            self._print(path, self._shown.get(path, 0), path.stat().st_size)

    def finish(self) -> None:
        """Print lines that have no end."""
        for path, line in self._cut.items():
            if line:
                self._line(path, line + b"\n")
        self._cut.clear()
        sys.stdout.buffer.flush()

    def _print(self, path: Path, start: int, end: int) -> None:
        if end <= start:
            return
        with path.open("rb") as file:
            file.seek(start)
            text = self._cut.pop(path, b"") + file.read(end - start)
        *lines, cut = text.split(b"\n")
        for line in lines:
            self._line(path, line + b"\n")
        self._cut[path] = cut
        self._shown[path] = end
        sys.stdout.buffer.flush()

    def _line(self, path: Path, line: bytes) -> None:
        if self.prefix:
            rank = stamps.rank_of(path)
            prefix = f"[rank {rank}]"
            if sys.stdout.isatty():
                prefix = f"\x1b[{COLOURS[rank % len(COLOURS)]}m{prefix}\x1b[0m"
            line = prefix.encode() + b" " + line
        sys.stdout.buffer.write(line)

    def _missing(self, attempt: int) -> str:
        there = sorted(self.run.path.glob("logs/attempt-*/node-*/rank-*.log"))
        if not there:
            return f"run {self.run.name} has no logs yet: python -m launch status {self.run.name}"
        ranks = [stamps.rank_of(path) for path in there if path.parts[-3] == f"attempt-{attempt}"]
        if not ranks:
            return (
                f"run {self.run.name} has no attempt {attempt}; the newest is {_newest(self.run)}"
            )
        return (
            f"attempt {attempt} of run {self.run.name} has no such log; it has ranks 0 to "
            f"{max(ranks)} on nodes 0 to {max(int(path.parent.name[5:]) for path in there)}"
        )


def _newest(run: RunDir) -> int:
    numbers = [int(path.name.removeprefix("attempt-")) for path in run.path.glob("logs/attempt-*")]
    return max(numbers, default=0)


def _follow(run: RunDir, view: View, attempt: int, stays: bool) -> int:
    if view.files(attempt):
        view.show(attempt)
    asked, is_over = 0.0, False
    while not is_over:
        if time.monotonic() > asked + ASK_EVERY:
            is_over = not states.look([run])[0][0].is_live  # asked before the last look
            asked = time.monotonic()
        if not stays and _newest(run) > attempt:
            view.add(attempt)
            attempt = _newest(run)
        view.add(attempt)
        time.sleep(0 if is_over else LOOK)
    view.finish()
    if not view.files(attempt):
        raise NoRunError(f"run {run.name} has ended without a log: python -m launch why {run.name}")
    return 0
