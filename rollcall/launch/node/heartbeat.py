"""Notice that another node's supervisor has gone: by its heartbeat, and by asking it.

No clocks are compared: a node is silent when its count stays the same for a while by the watcher's
clock. The nodes form a tree with the head at its root, and each watches its parent and its
children. So a node reads a few files however many nodes there are. Files are opened once, and again
if a count has stood still for a while, because a client of NFS may show an old one.

A silent node may only wait for a slow disk. So it is asked over the network before it counts as
lost, and LIMITS says how long each answer is good for. The parent of a node's ranks wakes a
supervisor that somebody stopped.

A node whose round has failed marks its heartbeat. So the news reaches the others without a file for
which all of them would have to look all the time.
"""

import contextlib
import math
import os
import threading
from collections.abc import Mapping

from rollcall.launch.node.identity import Node
from rollcall.launch.node.pulse import OVER, Opinion, Pulse, ask
from rollcall.messages.refusal import RefusedError
from rollcall.records.attempt import Heartbeat
from rollcall.records.run_dir import RunDir
from rollcall.system.timer import Every, RunningClock

CHILDREN = 16
"""Nodes that a node watches in the tree, in addition to its parent."""
EVERY = 0.5
"""Seconds between two counts, and between two looks at the others, in a small job."""
SELDOM = 2.0
"""The same in a large job: a file server should not be busy with heartbeats."""
LARGE = 1000
"""Nodes of a large job; in between, the seconds grow with the nodes."""
SUSPICION = 5.0
"""Seconds without a new count after which a node can count as lost at all."""
ASK_EVERY = 5.0
"""Seconds between two questions to a node."""
TIMEOUT = "ROLLCALL_HEARTBEAT_TIMEOUT"
"""The variable with the seconds of silence after which an unreachable node counts as lost."""
PATIENCE = 30.0
"""Its default."""
LIMITS: Mapping[Opinion | None, tuple[float, float]] = {
    "refused": (0.0, 0.0),
    "unreachable": (1.0, 1.0),
    None: (1.0, 1.0),
    "frozen": (10.0, 1.0),
    "alive": (math.inf, 10.0),
}
"""How often that time a node may be silent after each answer (None: not asked yet), while its ranks
may run, and once the round has failed. Ranks are not ended because a supervisor is slow."""
DOUBT = 2.5
"""Seconds without a new count after which a node's file is opened again, and the node asked."""
BEGIN = 240.0
"""Seconds that a node has until its first count; others wait longer for the head to publish."""
LEFT = 60.0
"""Seconds for which a node runs on when others have ended: all should end together."""
FAILED = b"!"
"""The first byte while the node knows that the round has failed."""


def interval(nodes: int) -> float:
    """Return the seconds between two counts in a job of this many nodes."""
    return max(EVERY, min(SELDOM, SELDOM * nodes / LARGE))


def patience() -> float:
    """Return the seconds of silence after which an unreachable node counts as lost."""
    text = os.environ.get(TIMEOUT, str(PATIENCE))
    with contextlib.suppress(ValueError):
        if SUSPICION < float(text) < math.inf:
            return float(text)
    expected = f"expected a number of seconds above {SUSPICION:.0f}"
    raise RefusedError(f"{TIMEOUT}: {expected}, got '{text}'")


class Watch:
    """A node's knowledge of the nodes that it watches; without a clock, files and sockets."""

    def __init__(self, number: int, count: int, now: float, patience: float = PATIENCE) -> None:
        """Watch the neighbours of the node `number` of `count` nodes."""
        first = CHILDREN * number + 1
        parent = [(number - 1) // CHILDREN] if number else []
        self.watched = [*parent, *range(first, min(first + CHILDREN, count))]
        self._seen: dict[int, tuple[bytes, float]] = dict.fromkeys(self.watched, (b"", now))
        self._tried: dict[int, float] = {}  # when the files of nodes that had none were looked for
        self._patience = patience
        self._asked: dict[int, float] = {}  # when each node was asked last
        self._opinions: dict[int, tuple[Opinion, float]] = {}  # the last answers, and since when
        self._reached: set[int] = set()  # nodes that took a connection

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

    def to_ask(self, now: float) -> list[int]:
        """Return the nodes to ask now: once when they begin, and while they are silent."""
        chosen = []
        for number, (count, since) in self._seen.items():
            last = self._asked.get(number)
            is_due = last is None or (now - since > DOUBT and now - last > ASK_EVERY)
            if count and OVER not in count and is_due:
                self._asked[number] = now
                chosen.append(number)
        return chosen

    def learn(self, number: int, opinion: Opinion, now: float) -> None:
        """Take note of the answer to a question."""
        if opinion in ("alive", "frozen"):
            self._reached.add(number)
        elif number not in self._reached:
            opinion = "unreachable"  # a firewall refuses, too
        self._opinions[number] = (opinion, now)

    def look(self, counts: Mapping[int, bytes], now: float, has_failed: bool = False) -> int | None:
        """Return a node that is lost, by the marks just read; see LIMITS for a failed round."""
        for number, mark in counts.items():
            if mark not in (b"", self._seen[number][0]):
                self._seen[number] = (mark, now)
        for number, (count, since) in self._seen.items():
            limit = self._limit(number, since, has_failed) if count else BEGIN
            if OVER not in count and now - since > limit:
                return number
        return None

    def have_left(self, now: float, seconds: float) -> bool:
        """Return True if a node has ended in order, for this many seconds at least."""
        return any(OVER in count and now - since >= seconds for count, since in self._seen.values())

    def begin_anew(self, number: int, now: float) -> None:
        """Measure the silence of a node from now on: it was reported, and may refute that."""
        self._seen[number] = (self._seen[number][0], now)

    def _limit(self, number: int, since: float, has_failed: bool) -> float:
        opinion, when = self._opinions.get(number, (None, since))
        if when <= since:  # of an earlier silence
            opinion = None
        running, failed = LIMITS[opinion]
        return max(SUSPICION, (failed if has_failed else running) * self._patience)


class Heartbeats:
    """This node's signs of life, and what it knows of the others'."""

    def __init__(self, run: RunDir, node: Node) -> None:
        self._watch = Watch(node.number, node.count, 0.0, patience())
        watched = self._watch.watched
        self._others = {n: Heartbeat.of_node(run.path, node.key, n) for n in watched}
        self._answers: dict[int, Opinion] = {}  # that have not been looked at yet
        seconds = interval(node.count)
        self._timer = Every(seconds)
        # If we are held up, by a suspended job or a slow disk, so may the others be.
        self._clock = RunningClock(2 * seconds)
        self._pulse: Pulse | None = None
        if watched:
            heartbeat = Heartbeat.of_node(run.path, node.key, node.number)
            self._pulse = Pulse(heartbeat, seconds, node.peer or "")

    def look(self, has_failed: bool = False) -> tuple[int | None, bool]:
        """Return a lost node, if it is time to look, and True if another knows of a failure."""
        if self._pulse is None:
            return None, False
        if self._pulse.mark(FAILED if has_failed else b"0"):
            self._timer.make_due()
        if not self._timer.is_due():
            return None, False
        chosen = self._watch.reads(self._clock.read())
        counts = {number: self._others[number].read(doubt) for number, doubt in chosen.items()}
        is_told = any(count.startswith(FAILED) for count in counts.values())
        now = self._clock.read()
        for number in list(self._answers):
            self._watch.learn(number, self._answers.pop(number), now)
        silent = self._watch.look(counts, now, has_failed)
        for number in self._watch.to_ask(now):
            with contextlib.suppress(RuntimeError):  # no more threads
                threading.Thread(target=self._ask, args=[number], daemon=True).start()
        return silent, is_told

    def have_left(self, seconds: float) -> bool:
        """Return True if a node that we watch has ended in order, and all others will, too."""
        return self._watch.have_left(self._clock.read(), seconds)

    def begin_anew(self, number: int) -> None:
        """Measure the silence of a node from now on: it was reported, and may refute that."""
        self._watch.begin_anew(number, self._clock.read())

    def _ask(self, number: int) -> None:
        self._answers[number] = ask(self._others[number].address)

    def end(self, has_failed: bool) -> None:
        """Tell the others that this node ends in order, and whether the round has failed."""
        if self._pulse is not None:
            if has_failed:
                self._pulse.mark(FAILED)
            self._pulse.end()
