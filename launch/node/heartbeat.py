"""Notice that another node's supervisor has gone, by the heartbeat file that each one writes.

No clocks are compared: a node is silent when its count stays the same for a while by the watcher's
clock. The nodes form a tree with the head at its root, and each watches its parent and its
children. So a node reads a few files however many nodes there are. Files are opened once, and again
if a count has stood still for a while, because a client of NFS may show an old one.

A node whose round has failed marks its heartbeat. So the news reaches the others without a file for
which all of them would have to look all the time.
"""

from collections.abc import Mapping
from typing import NamedTuple

from rollcall.launch.node.identity import Node
from rollcall.records.attempt import COUNT_BYTES, Heartbeat
from rollcall.run_dir import RunDir
from rollcall.timer import Every, RunningClock

CHILDREN = 16
"""Nodes that a node watches in the tree, in addition to its parent."""
EVERY = 0.5
"""Seconds between two counts, and between two looks at the others, in a small job."""
SELDOM = 2.0
"""The same in a large job: a file server should not be busy with heartbeats."""
LARGE = 1000
"""Nodes of a large job; in between, the seconds grow with the nodes."""
SILENCE = 5.0
"""Seconds without a new count after which a node counts as lost."""
DOUBT = 2.5
"""Seconds without a new count after which a node's file is opened again."""
BEGIN = 300.0
"""Seconds that a node has until its first count."""
LEFT = 60.0
"""Seconds after which a node that ended counts as lost if we still run: all should end together."""
OVER = b"over"
"""Stands in place of a count once the supervisor has ended in order."""
FAILED = b"!"
"""The first byte while the node knows that the round has failed."""


def interval(nodes: int) -> float:
    """Return the seconds between two counts in a job of this many nodes."""
    return max(EVERY, min(SELDOM, SELDOM * nodes / LARGE))


class Watch:
    """A node's knowledge of the nodes that it watches; without a clock and without files."""

    def __init__(self, number: int, count: int, now: float) -> None:
        """Watch the neighbours of the node `number` of `count` nodes."""
        first = CHILDREN * number + 1
        parent = [(number - 1) // CHILDREN] if number else []
        self.watched = [*parent, *range(first, min(first + CHILDREN, count))]
        self._seen: dict[int, tuple[bytes, float]] = dict.fromkeys(self.watched, (b"", now))
        self._tried: dict[int, float] = {}  # when the files of nodes that had none were looked for

    def reads(self, now: float) -> dict[int, bool]:
        """Return the nodes whose files to read now, and whether to open each file again."""
        chosen = {}
        for number, (count, since) in self._seen.items():
            if count:
                chosen[number] = OVER not in count and now - since > DOUBT
            elif now >= self._tried.get(number, now):
                self._tried[number] = now + SELDOM
                chosen[number] = True
        return chosen

    def look(self, counts: Mapping[int, bytes], now: float) -> int | None:
        """Compare what was read with what was read before; return the node that is silent."""
        for number, found in counts.items():
            if found not in (b"", self._seen[number][0]):
                self._seen[number] = (found, now)
        for number, (count, since) in self._seen.items():
            limit = LEFT if OVER in count else SILENCE if count else BEGIN
            if now - since > limit:
                return number
        return None


class News(NamedTuple):
    """The result of a look at the other nodes' heartbeats."""

    silent: int | None = None  # a node that is lost
    has_failed: bool = False  # whether a node says that the round has failed


class Heartbeats:
    """This node's heartbeat, and what it knows of the others'."""

    def __init__(self, run: RunDir, node: Node) -> None:
        self._own = Heartbeat.of_node(run.path, node.key, node.number)
        self._watch = Watch(node.number, node.count, 0.0)
        watched = self._watch.watched
        self._others = {n: Heartbeat.of_node(run.path, node.key, n) for n in watched}
        self._count = 0
        self._interval = interval(node.count)
        self._timer = Every(self._interval)
        self._has_failed = False
        # If we are held up, by a suspended job or a slow disk, so may the others be.
        self._clock = RunningClock(2 * self._interval)

    def beat(self, has_failed: bool = False) -> News:
        """Count and look at the others, if it is time to.

        Args:
            has_failed: whether this node knows that the round has failed; the others read it.
        """
        if has_failed != self._has_failed:
            self._has_failed = has_failed
            self._timer.make_due()
        if not self._others or not self._timer.is_due():
            return News()
        self._count += 1
        self._own.write(self._mark + b"%07d" % (self._count % 10**7))
        chosen = self._watch.reads(self._clock.read())
        counts = {number: self._others[number].read(again) for number, again in chosen.items()}
        is_told = any(count.startswith(FAILED) for count in counts.values())
        return News(self._watch.look(counts, self._clock.read()), is_told)

    def end(self, has_failed: bool) -> None:
        """Tell the others that this node ends in order, and whether the round has failed."""
        self._has_failed |= has_failed
        if self._others:
            self._own.write((self._mark + OVER).ljust(COUNT_BYTES))

    @property
    def _mark(self) -> bytes:
        return FAILED if self._has_failed else b"0"
