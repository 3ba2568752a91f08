"""One node's part of one attempt: start the agent, look after the ranks until it ends."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Sequence

from launch import processes
from launch.comment import Comment
from launch.deadline import Deadline
from launch.follow import Output
from launch.forker import Forker
from launch.heartbeat import Heartbeat
from launch.node import Node
from launch.processes import REQUESTS, Frozen, Request
from launch.rendezvous import Failure, Meeting, Rendezvous, route
from launch.stamps import Stamps
from train.run import RunDir

TICK = 0.25
"""Seconds between two looks at the log and the agent."""
PEER_CHECK = 0.5
"""Seconds between two looks at whether another node has failed."""
STOP_GRACE = 600.0
"""Seconds that ranks have to save and leave when asked to stop; Slurm's own limits come first."""
FAILURE_GRACE = 3.0
"""Seconds that ranks have to notice and say that another node has failed."""


class Watch:
    """What a supervisor listens to and looks at, over all attempts.

    Attributes:
        requests: the signals that asked to stop.
        kill_at: when the ranks are ended, by the monotonic clock; None for not at all.
        failure: which node has failed in this round.
    """

    def __init__(self, run: RunDir, node: Node, meeting: Meeting) -> None:
        self.requests: list[Request] = []
        self.kill_at: float | None = None
        self.failure: Failure | None = None
        self._meeting = meeting
        self._heartbeat = Heartbeat(run, node)
        self._deadline = Deadline(run, node)
        self._peer_check = 0.0

    @property
    def has_lost(self) -> bool:
        """Whether another node was missed in this round."""
        return self.failure is not None and self.failure.is_lost

    def listen(self, timeout: float) -> bool:
        """Wait for a signal, and look at the other nodes; whether it asks to stop."""
        info = signal.sigtimedwait([*REQUESTS, signal.SIGCHLD], timeout)
        self._look_at_peers()
        self._deadline.update()
        if info is None or info.si_signo == signal.SIGCHLD:
            return False
        # Slurm repeats signals; only a person's second Ctrl-C means more than the first.
        known = {request.number for request in self.requests}
        if info.si_signo == signal.SIGINT or info.si_signo not in known:
            self.requests.append(Request(info.si_signo))
        self.kill_at = self.kill_at or time.monotonic() + STOP_GRACE
        self._deadline.ask()
        return True

    def next_round(self) -> None:
        """Forget the round that has failed."""
        self._meeting.round += 1
        self.failure = self.kill_at = None

    def end(self) -> None:
        """Say that this node takes no further part."""
        self._heartbeat.end()

    def _look_at_peers(self) -> None:
        silent = self._heartbeat.beat()
        now = time.monotonic()
        if self.failure or (silent is None and now < self._peer_check):
            return
        self._peer_check = now + PEER_CHECK
        if silent is not None:
            self._meeting.miss(silent)
        self.failure = self._meeting.failure()
        if self.failure:
            end = now + (0 if self.failure.is_lost else FAILURE_GRACE)
            self.kill_at = min(self.kill_at or end, end)


class Attempt:
    """This node's part of one attempt."""

    def __init__(
        self, run: RunDir, node: Node, ranks: int, rendezvous: Rendezvous, watch: Watch
    ) -> None:
        self.run = run
        self.node = node
        self.ranks = ranks
        self.rendezvous = rendezvous
        self.watch = watch
        self.log = run.log(rendezvous.attempt, node.number, node.number * ranks)

    def words(self, key: str, start_method: str, program: Sequence[str]) -> list[str]:
        """The agent's command line."""
        world_size = self.node.count * self.ranks
        words = [f"--nnodes={self.node.count}", f"--node-rank={self.node.number}"]
        words += [f"--nproc-per-node={self.ranks}", f"--expect-world={world_size}"]
        words += [f"--master-addr={self.rendezvous.address}"]
        words += [f"--master-port={self.rendezvous.port}"]
        words += [f"--run-id={key}", f"--log-dir={self.log.parent}"]
        return [*words, f"--start-method={start_method}", *program]

    def env(self) -> dict[str, str]:
        """The environment of the agent and the ranks.

        Raises:
            HostError: the head is not reached.
        """
        interface = route(self.node, self.rendezvous.address).interface
        env = {
            "GLOO_SOCKET_IFNAME": interface,
            # "=" for exactly this one; NCCL shuns lo by itself and needs no address on one node
            **({"NCCL_SOCKET_IFNAME": f"={interface}"} if interface != "lo" else {}),
            **os.environ,
            "ROLLCALL_WORLD_SIZE": str(self.node.count * self.ranks),
        }
        if self.node.gpus is not None:
            env["CUDA_VISIBLE_DEVICES"] = self.node.gpus
        return env

    def follow(self, forker: Forker) -> int:
        """Look after the ranks until the agent ends; return its exit code, 128 + n for signal n."""
        stamps, comment, frozen = Stamps(self.log.parent), Comment(self.run, self.node), Frozen()
        output = Output([self.log] if self.node.is_head else [])
        while (code := forker.poll()) is None:
            self.watch.listen(TICK)
            _show(output)
            stamps.look()
            comment.update()
            ranks = processes.children(forker.agent) if forker.agent else []
            for request in self.watch.requests:
                request.deliver(ranks)
            for pid in frozen.find([*ranks, *forker.pids]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self.watch.kill_at is not None and time.monotonic() > self.watch.kill_at:
                forker.kill_agent()
        processes.end_orphans(keep=forker.pid)
        _show(output)
        stamps.look(at_once=True)
        return code


def _show(output: Output) -> None:
    try:
        output.show()
    except OSError as error:  # a run needs nobody who reads its output, nor room for it
        if error.errno in (errno.EIO, errno.EPIPE):  # the terminal or the reader has gone for good
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for descriptor in (1, 2):
                os.dup2(nowhere, descriptor)
            os.close(nowhere)
