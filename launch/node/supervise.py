"""`rollcall supervise -- -m train digits`: the supervisor, one process on every node.

It meets the other nodes in the run directory, starts this node's ranks, passes signals on to them,
and ends them when another node has failed. Then all nodes restart their ranks, if the head decides.

Exit code: 0 done, 75 stopped in order (start it again to continue), 69 another node was lost;
anything else is a failure.
"""

import argparse
import contextlib
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from rollcall.hosts import HostError, ranks_of_nodes
from rollcall.launch import frameworks
from rollcall.launch.node import heartbeat, identity, processes, takeover
from rollcall.launch.node.attempt import NodeAttempt, NodeMonitor, environment, place_words
from rollcall.launch.node.fork_client import ForkClient
from rollcall.launch.node.identity import Node, NodeError
from rollcall.launch.node.processes import REQUESTS
from rollcall.launch.node.rendezvous import DEADLINE, Meeting, RendezvousError
from rollcall.launch.runs import find, resolve, restarts
from rollcall.launch.runs.resolve import Work
from rollcall.process import outlast_full_disks
from rollcall.records.attempt import AttemptEvent, NodeState, NoMoreRounds, PartState, Rendezvous
from rollcall.records.run import State, Verdict
from rollcall.refusal import REFUSED
from rollcall.timer import Growing

LOOK, SLOW_LOOK = 0.05, 0.4
"""Seconds between the first looks at what the head has published, and between later ones."""
REPORTS = 5.0
"""Seconds that the head waits for the other nodes' reports, to find the cause of a failure."""
KNOWN = (HostError, RendezvousError, resolve.CommandError, OSError)
"""Errors whose message says enough."""


class Supervisor:
    """This node's part of a run, from the first rendezvous to the exit code."""

    def __init__(
        self,
        work: Work,
        node: Node,
        ranks: Sequence[int],
        start_method: str,
        framework: str,
        max_restarts: int | None,
        server: ForkClient,
    ) -> None:
        self.work, self.run = work, work.run
        self.node, self.ranks, self.start_method = node, ranks, start_method  # ranks of each node
        self.framework = framework
        self.max_restarts = max_restarts  # None for as long as they make progress
        self.meeting = Meeting(self.run, node)
        self.monitor = NodeMonitor(self.run, node, self.meeting)
        self.server = server

    def go(self) -> int:
        """Make attempts until one is the last; return the exit code."""
        code = os.EX_TEMPFAIL
        try:
            if self.node.is_head and self.work.directory is not None:
                resolve.check_code(self.work.directory)  # one node looks at all files
            has_finished = False
            while True:
                if self.node.is_head:
                    self.run.forget_verdict()
                    code, is_last = self._attempt(*self.meeting.publish(self.ranks))
                else:
                    found = self._await_head(math.inf if has_finished else DEADLINE)
                    if found is None:
                        return os.EX_TEMPFAIL  # asked to stop while waiting
                    if isinstance(found, NoMoreRounds):
                        return os.EX_UNAVAILABLE if self.monitor.has_lost else code
                    code, is_last = self._attempt(found, None)
                has_finished = code == 0
                if is_last:
                    return code
                self.monitor.next_round()
        except Exception as error:
            # OSError: the run directory is gone or full. The others must not wait for us.
            if self.monitor.failure is None:
                known = isinstance(error, KNOWN)
                with contextlib.suppress(OSError):
                    self.meeting.give_up(
                        str(error) if known else f"{type(error).__name__}: {error}"
                    )
            raise
        finally:
            self.server.kill()
            processes.end_orphans()
            verdict = self.run.read_verdict()
            asked = verdict is not None and verdict.state == "requeue"
            if self.node.is_head:
                self.meeting.round += 1
                with contextlib.suppress(OSError):
                    self.meeting.publish_end("the head has ended")
            self.monitor.end()
            self.monitor.batch.finish(comes_back=asked and code == os.EX_TEMPFAIL)

    def _await_head(self, patience: float) -> Rendezvous | NoMoreRounds | None:
        """Wait for the head to publish where the nodes meet; None if asked to stop before."""
        end = self.monitor.clock.read() + patience
        has_finished = patience == math.inf
        most = heartbeat.SELDOM if has_finished else SLOW_LOOK
        look = Growing(LOOK, most)
        while not look.is_due() or (found := self.meeting.read(self.ranks)) is None:
            if self.monitor.listen(LOOK) and not has_finished:  # else there is nothing to stop
                return None
            if self.monitor.has_lost:
                return NoMoreRounds(str(self.monitor.failure))
            if self.monitor.failure:
                raise RendezvousError(str(self.monitor.failure))
            if self.monitor.clock.read() > end:
                raise self.meeting.silence()
        return found

    def _attempt(self, rendezvous: Rendezvous, holder: socket.socket | None) -> tuple[int, bool]:
        """Run this node's ranks to their end; return what `_conclude` does."""
        attempt = NodeAttempt(self.run, self.node, self.ranks, rendezvous, self.monitor)
        number, node = rendezvous.attempt, self.node
        part = NodeState(number, node.number, node.host, "running", time.time(), os.getpid())
        part = replace(part, nccl=attempt.nccl)
        words = attempt.words(
            self.meeting.key, self.start_method, self.framework, self.work.program
        )
        self.server.start(words, attempt.env(self.work.modules), holder)
        attempt.comes_back = self.work.is_training
        if holder is not None:
            holder.close()  # the agent has it now
        part.write(self.run.path)  # while the ranks start
        if self.node.is_head:
            event = self._event(number, "started")
            replace(event, hosts=list(node.hosts), ranks=sum(self.ranks)).append(self.run.path)
        state, code = self._outcome(attempt.follow(self.server))
        asked = next((signal.Signals(it.number).name for it in self.monitor.requests), None)
        part = replace(part, asked=asked, is_victim=attempt.is_victim)
        if state == "failed" and self.monitor.failure is None:
            self.meeting.fail(f"its ranks ended with exit code {code}", leaves=code == REFUSED)
            self.monitor.failure = self.meeting.failure()
        with contextlib.suppress(OSError):  # a full disk does not change how the ranks ended
            replace(part, ended=time.time(), state=state, exit_code=code).write(self.run.path)
        if self.node.is_head:
            with contextlib.suppress(OSError):
                event = self._event(number, "ended")
                replace(event, state=state, exit_code=code).append(self.run.path)
        return self._conclude(state, code)

    def _outcome(self, code: int) -> tuple[PartState, int]:
        # torchrun reports every failure as 1, so the verdict of rank 0 counts if there is one.
        verdict = self.run.read_verdict()
        if verdict is not None and verdict.state == "done":
            return "finished", 0
        if code == os.EX_TEMPFAIL or (verdict and verdict.state in ("requeue", "stopped")):
            return "stopped", os.EX_TEMPFAIL
        # A user's program writes no verdict; the batch process may have, before it has ended.
        if code == 0 and (verdict is None or not self.work.is_training):
            return "finished", 0
        if self._is_cancelled():
            return "stopped", code
        return "failed", code or 1

    def _is_cancelled(self) -> bool:
        """Whether a person ended the job: then a user's program that ends has not failed."""
        return not self.work.is_training and self.node.job in find.cancelled(self.run)

    def _conclude(self, state: PartState, code: int) -> tuple[int, bool]:
        """Return the exit code and whether this attempt was the last; the head decides for all."""
        failure = self.monitor.failure
        if state == "finished" and not self.node.is_head:
            return code, False  # ranks of other nodes may still run, or fail and restart with ours
        if state != "failed" or self.monitor.has_lost:
            self._conclude_for_user_program(state, code)
            return (os.EX_UNAVAILABLE if state == "failed" else code), True
        _say(f"node {self.node.number} ({self.node.host}) ends: {failure}")
        if not self.node.is_head:
            return code, False
        leaves = failure is not None and failure.leaves
        is_over = leaves or self.monitor.requests or not self._may_restart()
        if is_over or self.monitor.requests:  # which may have come while it was decided
            self._conclude_for_user_program(state, code)
            return code, True
        restarts.note(self.run, self.node.job, "crash")
        _say("the ranks restart from the last checkpoint")
        return code, False

    def _may_restart(self) -> bool:
        if self.max_restarts is not None and self.meeting.round >= self.max_restarts:
            return False
        # Only the author of a script knows whether restarting it makes progress.
        trains = self.work.is_training
        is_allowed = not trains or restarts.allowed(self.run, self.node.job, "crash")
        if is_allowed and trains and self.run.read_events("first_step"):
            return True
        from rollcall.launch.runs import root_cause  # here, because few runs need it

        self._await_reports()
        cause = root_cause.of_newest(self.run)
        if restarts.is_permanent(self.run, cause.failure, trains):
            _say(f"{cause.what}: not restarted, because every attempt would fail in the same way")
            reason = cause.what
        elif is_allowed:
            return True
        else:
            reason = f"{cause.what} ({restarts.MOST} times without a new checkpoint)"
        self.run.conclude(Verdict("failed", restarts.saved_step(self.run), reason))
        return False

    def _await_reports(self) -> None:
        """Wait for a moment until the other nodes have written how their part ended."""
        end = self.monitor.clock.read() + REPORTS
        attempt = self.run.next_attempt() - 1  # the newest one
        while self.monitor.clock.read() < end:
            parts = NodeState.read_all(self.run.path, attempt=attempt).values()
            if all(part.state != "running" for part in parts):
                return
            self.monitor.listen(0.05)

    def _conclude_for_user_program(self, state: PartState, code: int) -> None:
        """Write the verdict of a submitted program of the user's, which writes none itself."""
        if self.work.is_training or not self.work.is_submitted or not self.node.is_head:
            return
        verdict: State = "done" if state == "finished" else "failed"
        if verdict == "failed" and self.run.read_verdict() is not None:
            return  # `_may_restart` has said why
        if state == "stopped":
            asked = any(request.number != signal.SIGINT for request in self.monitor.requests)
            verdict = "requeue" if asked and not self._is_cancelled() else "stopped"
        reason = f"the program ended with exit code {code}"
        if state == "finished" and (alone := find.alone(self.run)):
            reason += f"; {alone}"
            _say(
                f"note: {alone}: each did all of the work, unless they connect without MASTER_ADDR"
            )
        with contextlib.suppress(OSError):
            self.run.conclude(Verdict(verdict, 0, reason))

    def _event(self, attempt: int, event: Literal["started", "ended"]) -> AttemptEvent:
        return AttemptEvent(attempt, self.node.job, event, time.time())


def main(argv: Sequence[str]) -> int:
    """Run this node's part of a run; return the exit code."""
    # Blocked, not handled: from here on no signal is lost, and each is taken when it is useful.
    signal.pthread_sigmask(signal.SIG_BLOCK, [*REQUESTS, signal.SIGCHLD])
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the run outlives the terminal
    processes.adopt_orphans()
    outlast_full_disks()
    options = resolve.parser().parse_args(argv)
    server = ForkClient()
    try:
        return _supervise(options, server)
    finally:
        server.kill()


def _supervise(options: argparse.Namespace, server: ForkClient) -> int:
    try:
        node = identity.find(os.environ)
        ranks = ranks_of_nodes(options.nproc_per_node or str(node.default_ranks), node.count)
        words = [*place_words(node, ranks), f"--start-method={options.start_method}"]
        # It imports while the rest is found out.
        server.begin([*words, *resolve.program_of(options)], environment(node, options.modules))
        work = resolve.work_of_supervisor(options, os.environ, node.job)
    except (NodeError, ValueError) as error:
        return _fail(str(error))
    run = work.run
    if work.is_named and (text := resolve.finished(run)):
        print(text)
        return 0
    max_restarts = options.max_restarts
    if work.is_training:
        work = replace(work, program=(*work.program, *run.words))
    elif max_restarts is None:
        max_restarts = 0  # only its author knows whether restarting it makes progress
    try:
        run.create()
        framework = options.framework or frameworks.guess(work.program)
        how = (options.start_method, framework, max_restarts)
        code = Supervisor(work, node, ranks, *how, server).go()
    except KNOWN as error:
        return _fail(f"node {node.number} ({node.host}): {error}")
    if code == os.EX_UNAVAILABLE and not node.is_head:
        takeover.take_over(run, node.job, node.host)
    return code


def _fail(message: str) -> int:
    _say(f"rollcall: error: {message}")
    return REFUSED


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it, or the disk is full
        print(text, file=sys.stderr, flush=True)
