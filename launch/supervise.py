"""`python -m launch supervise -- -m train digits`: the process that runs once on every node.

It finds out which node this is, meets the other nodes in the run directory, starts this node's
ranks through train.agent, passes signals on to them, and ends them when another node has failed.
Then all nodes start their ranks again from the last checkpoint, if the head says so. It is the same
from submit.py, from a plain sbatch template and on one machine.

Exit code: 0 done, 75 stopped in order (start it again to continue), 69 another node was lost,
anything else failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from launch import node as nodes
from launch import processes, restarts, takeover, which
from launch.attempt import Attempt, Watch
from launch.forker import Forker
from launch.node import Node, NodeError
from launch.processes import REQUESTS
from launch.rendezvous import (
    DEADLINE,
    Meeting,
    Over,
    Rendezvous,
    RendezvousError,
    attempt_directory,
)
from launch.words import word
from train.hosts import HostError
from train.output import outlast_full_disks
from train.run import RunDir, State, Verdict, append_line, write_atomic

REFUSED = 2
"""Exit code for a request that would be refused again."""


class Supervisor:
    """This node's part of a run, from the first rendezvous to the exit code.

    Args:
        max_restarts: how often the ranks start again at most; None for as long as they get on.
    """

    def __init__(
        self,
        run: RunDir,
        node: Node,
        ranks: int,
        program: Sequence[str],
        start_method: str,
        max_restarts: int | None,
    ) -> None:
        self.run = run
        self.node = node
        self.ranks = ranks
        self.program = program
        self.start_method = start_method
        self.max_restarts = max_restarts
        self.meeting = Meeting(run, node)
        self.watch = Watch(run, node, self.meeting)
        self.forker = Forker()

    def go(self) -> int:
        """Make attempts until one is the last; return the exit code.

        Raises:
            HostError, RendezvousError: the nodes cannot meet.
        """
        code = os.EX_TEMPFAIL
        try:
            while True:
                if self.node.is_head:
                    self.run.forget_verdict()
                    code, is_last = self._attempt(*self.meeting.publish(self.ranks))
                else:
                    found = self._hear()
                    if found is None:
                        return os.EX_TEMPFAIL  # asked to stop meanwhile
                    if isinstance(found, Over):
                        return os.EX_UNAVAILABLE if self.watch.has_lost else code
                    code, is_last = self._attempt(found, None)
                if is_last:
                    return code
                self.watch.next_round()
        except (HostError, RendezvousError, OSError) as error:
            # OSError: the run directory went away or is full; the others must not wait for us.
            with contextlib.suppress(OSError):
                self.meeting.fail(str(error), leaves=True)
            raise
        finally:
            self.forker.kill()
            processes.end_orphans()
            if self.node.is_head:
                self.meeting.round += 1
                with contextlib.suppress(OSError):
                    self.meeting.publish_end("the head has ended")
            self.watch.end()

    def _hear(self) -> Rendezvous | Over | None:
        """Where the head says that the nodes meet; None if asked to stop meanwhile."""
        end = time.monotonic() + DEADLINE
        while (found := self.meeting.read(self.ranks)) is None:
            if self.watch.listen(0.1):
                return None
            if self.watch.has_lost:
                return Over(str(self.watch.failure))
            if self.watch.failure:
                raise RendezvousError(str(self.watch.failure))
            if time.monotonic() > end:
                raise self.meeting.silence()
        return found

    def _attempt(self, rendezvous: Rendezvous, holder: socket.socket | None) -> tuple[int, bool]:
        """Run this node's ranks to their end; exit code, and whether that was the last attempt."""
        attempt = Attempt(self.run, self.node, self.ranks, rendezvous, self.watch)
        state_file = (
            attempt_directory(self.run, rendezvous.attempt) / f"node-{self.node.number}.json"
        )
        started = {"node": self.node.number, "host": self.node.host, "started": time.time()}
        write_atomic(state_file, json.dumps({**started, "state": "running"}) + "\n")
        if self.node.is_head:
            ranks = self.node.count * self.ranks
            self._note(rendezvous, "started", hosts=self.node.hosts, ranks=ranks)
        words = attempt.words(self.meeting.key, self.start_method, self.program)
        self.forker.start(words, attempt.env(), holder)
        if holder is not None:
            holder.close()  # the agent has it now
        state, code = self._outcome(attempt.follow(self.forker))
        if state == "failed" and self.watch.failure is None:
            self.meeting.fail(f"its ranks ended with exit code {code}", leaves=code == REFUSED)
            self.watch.failure = self.meeting.failure()
        ended = {**started, "ended": time.time(), "state": state, "exit_code": code}
        with contextlib.suppress(OSError):  # a full disk does not change how the ranks have ended
            write_atomic(state_file, json.dumps(ended) + "\n")
        if self.node.is_head:
            with contextlib.suppress(OSError):
                self._note(rendezvous, "ended", state=state, exit_code=code)
        return self._conclude(state, code)

    def _outcome(self, code: int) -> tuple[str, int]:
        """The state and exit code of this node's part.

        torch's agent makes every failure 1, so the verdict of rank 0 counts where there is one.
        """
        verdict = self.run.read_verdict()
        if verdict is not None and verdict.state == "done":
            return "finished", 0
        if code == os.EX_TEMPFAIL or (verdict and verdict.state in ("requeue", "stopped")):
            return "stopped", os.EX_TEMPFAIL
        if code == 0 and verdict is None:  # a program of the user's own, which writes none
            return "finished", 0
        return "failed", code or 1

    def _conclude(self, state: str, code: int) -> tuple[int, bool]:
        """What follows from how this node's part has ended: exit code, and whether it was the last.

        The head decides for all; the others learn it where they meet again.
        """
        failure = self.watch.failure
        if state != "failed" or self.watch.has_lost:
            self._speak_for_guest(state, code)
            return (os.EX_UNAVAILABLE if state == "failed" else code), True
        _say(f"node {self.node.number} ({self.node.host}) ends: {failure}")
        if not self.node.is_head:
            return code, False
        leaves = failure is not None and failure.leaves
        if leaves or self.watch.requests or not self._may_restart():
            self._speak_for_guest(state, code)
            return code, True
        restarts.note(self.run, self.node.job, "crash")
        _say("the ranks start again, from the last checkpoint")
        return code, False

    def _may_restart(self) -> bool:
        if self.max_restarts is not None and self.meeting.round >= self.max_restarts:
            return False
        is_own = list(self.program[:2]) != ["-m", "train"]
        # Whether a program of the user's own gets on, nobody but its author knows.
        if is_own or restarts.allowed(self.run, self.node.job, "crash"):
            return True
        from launch import why  # here, because few runs need it

        reason = f"{why.in_a_sentence(self.run)} ({restarts.MOST} times without a new checkpoint)"
        self.run.conclude(Verdict("failed", restarts.saved_step(self.run), reason))
        return False

    def _speak_for_guest(self, state: str, code: int) -> None:
        """Write the verdict of a program of the user's own, which writes none."""
        if not self.node.is_head or list(self.program[:2]) != ["-m", "launch.guest"]:
            return
        asked = any(request.number != signal.SIGINT for request in self.watch.requests)
        verdict: State = "requeue" if asked else "stopped"
        if state != "stopped":
            verdict = "done" if state == "finished" else "failed"
        with contextlib.suppress(OSError):
            self.run.conclude(Verdict(verdict, 0, f"the program ended with exit code {code}"))

    def _note(self, rendezvous: Rendezvous, event: str, **fields: Any) -> None:
        attempt = {"attempt": rendezvous.attempt, "job": self.node.job}
        line = {**attempt, "event": event, "time": time.time(), **fields}
        append_line(self.run.job / "attempts.jsonl", line)


def main(argv: Sequence[str]) -> int:
    """Run this node's part of a run; return the exit code."""
    # Blocked, not handled: no signal is lost from here on, and each is taken when it can be used.
    signal.pthread_sigmask(signal.SIG_BLOCK, [*REQUESTS, signal.SIGCHLD])
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the run outlives the terminal
    processes.adopt_orphans()
    outlast_full_disks()
    options = which.parser().parse_args(argv)
    try:
        node = nodes.find(os.environ)
        run, program, is_named = which.find(options, os.environ, node.job)
    except (NodeError, ValueError) as error:
        return _fail(str(error))
    if is_named and (text := which.finished(run)):
        print(text)
        return 0
    max_restarts = options.max_restarts
    if program[:2] == ["-m", "train"]:
        program += [word("run.name", run.name), word("run.root", str(run.path.parent))]
    elif max_restarts is None:
        max_restarts = 0  # only its author knows whether it can start again
    ranks = options.nproc_per_node or node.default_ranks
    try:
        run.create()
        code = Supervisor(run, node, ranks, program, options.start_method, max_restarts).go()
    except (HostError, RendezvousError, OSError) as error:
        return _fail(f"node {node.number} ({node.host}): {error}")
    if code == os.EX_UNAVAILABLE and not node.is_head:
        takeover.take_over(run, node.job, node.host)
    return code


def _fail(message: str) -> int:
    _say(f"supervise: error: {message}")
    return REFUSED


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it, or there is no room for it
        print(text, file=sys.stderr, flush=True)
