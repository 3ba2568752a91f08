"""One node's part of one attempt: start the ranks and look after them until they end."""

import contextlib
import errno
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from rollcall import fabric
from rollcall.launch.node import processes
from rollcall.launch.node.batch_process import BatchWatcher
from rollcall.launch.node.controller import DeadlineWatcher, JobComment
from rollcall.launch.node.fork_client import ForkClient
from rollcall.launch.node.heartbeat import Heartbeats, News
from rollcall.launch.node.identity import Node
from rollcall.launch.node.processes import REQUESTS, STOPPED, SignalDelivery, StoppedProcesses
from rollcall.launch.node.rendezvous import Meeting, route
from rollcall.launch.runs.log_times import LogWatcher, rank_of
from rollcall.launch.runs.output import Output
from rollcall.process import wait_for_signal
from rollcall.records.attempt import SUPERVISOR, NodeFailure, RankFailure, Rendezvous
from rollcall.run_dir import RunDir
from rollcall.timer import Every, RunningClock

TICK = 0.25
"""Seconds between two looks at the log and the agent."""
PEER_CHECK = 2.0
"""Seconds between two looks at whether another node has failed, if no heartbeat says so."""
STOP_GRACE = 600.0
"""Seconds that ranks have to save and exit when asked to stop; Slurm's own limits come first."""
FAILURE_GRACE = 3.0
"""Seconds that ranks have to notice that another node failed, and to say so."""


class NodeMonitor:
    """The signals, other nodes and time limit that a supervisor watches, over all attempts."""

    def __init__(self, run: RunDir, node: Node, meeting: Meeting) -> None:
        self.requests: list[SignalDelivery] = []  # that asked to stop
        self.kill_at: float | None = None  # when to kill the ranks, by the clock
        self.failure: NodeFailure | None = None  # of a node in this round
        self.clock = RunningClock()
        self._meeting = meeting
        self._heartbeats = Heartbeats(run, node)
        self._deadline = DeadlineWatcher(run, node)
        self.batch = BatchWatcher(run, node)
        self._peer_check = Every(PEER_CHECK)

    @property
    def has_lost(self) -> bool:
        """Whether another node was lost in this round."""
        return self.failure is not None and self.failure.is_lost

    @property
    def is_over(self) -> bool:
        """Whether the ranks have had all the time to end that they get."""
        return self.kill_at is not None and self.clock.read() > self.kill_at

    def listen(self, timeout: float) -> bool:
        """Wait for a signal and look at the other nodes; return whether it asks to stop."""
        number = wait_for_signal([*REQUESTS, signal.SIGCHLD], timeout)
        self.clock.read()
        if self.clock.was_stopped:
            self._deadline.ask_soon()  # Slurm has moved the job's end
        self._look_at_peers()
        self._deadline.update()
        self.batch.look()
        if number is None or number == signal.SIGCHLD:
            return False
        # Slurm repeats signals; only a person's second Ctrl-C means more than the first.
        known = {request.number for request in self.requests}
        if number == signal.SIGINT or number not in known:
            self.requests.append(SignalDelivery(number))
        self.kill_at = self.kill_at or self.clock.read() + STOP_GRACE
        self._deadline.ask_soon()
        return True

    def next_round(self) -> None:
        """Forget the round that has failed."""
        self._meeting.round += 1
        self.failure = self.kill_at = None

    def end(self) -> None:
        """Tell the other nodes that this one takes no further part."""
        self._heartbeats.end(has_failed=self.failure is not None)

    def _look_at_peers(self) -> None:
        news = self._heartbeats.beat(has_failed=self.failure is not None)
        if self.failure or (news == News() and not self._peer_check.is_due()):
            return
        if news.silent is not None:
            self._meeting.report_lost(news.silent)
        self.failure = self._meeting.failure()
        if self.failure:
            end = self.clock.read() + (0 if self.failure.is_lost else FAILURE_GRACE)
            self.kill_at = min(self.kill_at or end, end)


def place_words(node: Node, ranks: Sequence[int]) -> list[str]:
    """Return the words of the agent's command line that all attempts share."""
    words = [f"--nnodes={node.count}", f"--node-rank={node.number}"]
    return [*words, f"--nproc-per-node={','.join(map(str, ranks))}"]


def environment(node: Node, modules: Sequence[str]) -> dict[str, str]:
    """Return what all attempts have in common of their environment.

    Args:
        modules: directories with copies of the user's modules, which are searched first.
    """
    env = dict(os.environ)
    if modules:
        searched = [*modules, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, searched))
    if node.gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = node.gpus
    return env


class NodeAttempt:
    """This node's part of one attempt."""

    def __init__(
        self,
        run: RunDir,
        node: Node,
        ranks: Sequence[int],
        rendezvous: Rendezvous,
        monitor: NodeMonitor,
    ) -> None:
        self.run, self.node, self.ranks = run, node, ranks
        self.rendezvous, self.monitor = rendezvous, monitor
        self.log = run.log(rendezvous.attempt, node.number, sum(ranks[: node.number]))
        self.nccl = fabric.settings(os.environ)  # what NCCL needs for the fabric, unless set
        self.comes_back = False  # whether a request to stop means that the run is started again
        self.is_victim = False  # whether the ranks were ended because another node failed

    def words(
        self, key: str, start_method: str, framework: str, program: Sequence[str]
    ) -> list[str]:
        """Return the agent's command line."""
        words = place_words(self.node, self.ranks)
        words += [f"--master-addr={self.rendezvous.address}"]
        words += [f"--master-port={self.rendezvous.port}"]
        words += [f"--run-id={key}", f"--log-dir={self.log.parent}"]
        words += [f"--start-method={start_method}", f"--framework={framework}"]
        return [*words, *program]

    def env(self, modules: Sequence[str] = ()) -> dict[str, str]:
        """Return the environment of the ranks; raise HostError if the head cannot be reached."""
        interface = route(self.node, self.rendezvous.address).interface
        # a variable would replace what a file of NCCL's says
        is_free = "NCCL_SOCKET_IFNAME" not in fabric.configured(os.environ)
        return {
            "GLOO_SOCKET_IFNAME": interface,
            # "=" means exactly this one; NCCL avoids lo itself and needs no address on one node
            **({"NCCL_SOCKET_IFNAME": f"={interface}"} if is_free and interface != "lo" else {}),
            **self.nccl,
            **environment(self.node, modules),
            "ROLLCALL_WORLD_SIZE": str(sum(self.ranks)),
        }

    def follow(self, server: ForkClient) -> int:
        """Look after the ranks until the agent ends; return its exit code, 128 + n for signal n."""
        log_sizes, comment = LogWatcher(self.log.parent), JobComment(self.run, self.node)
        stopped = StoppedProcesses()
        output = Output([self.log] if self.node.is_head else [], is_local=True)
        started: dict[int, float] = {}  # when ranks opened their logs, by the clock
        while (code := server.poll()) is None:
            self.monitor.listen(TICK)
            comment.update()
            ranks = processes.children(server.agent) if server.agent else []
            if ranks:
                _show(output)
            log_sizes.look(ranks)
            now = self.monitor.clock.read()
            started |= {
                pid: now for pid in ranks if pid not in started and _rank_of(pid) is not None
            }
            ages = {pid: now - started.get(pid, now) for pid in ranks}
            for request in self.monitor.requests:
                request.deliver(ages)
            if self.monitor.requests and self.comes_back:
                self.monitor.batch.requeue_if_gone()
            for pid in stopped.find([*ranks, *server.pids]):
                self._end_stopped(pid, server)
            if self.monitor.is_over:
                self.is_victim |= self.monitor.failure is not None
                server.kill_agent()
        processes.end_orphans(keep=server.pid)
        _show(output)
        log_sizes.end()
        return code

    def _end_stopped(self, pid: int, server: ForkClient) -> None:
        """Kill a process that somebody stopped, after writing down that this is the cause."""
        rank = None if pid in server.pids else _rank_of(pid)
        who = "the parent of the ranks" if rank is None else f"rank {rank}"
        error = f"{who} was stopped, as by SIGSTOP, so it was killed after {STOPPED:.0f} s"
        code, place = 128 + signal.SIGKILL, self.log.parent
        failure = RankFailure(time.time(), self.node.host, code, error, rank, SUPERVISOR)
        with contextlib.suppress(OSError):
            failure.write(place)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _rank_of(pid: int) -> int | None:
    """Return the rank that a process is, by the log that it writes."""
    with contextlib.suppress(OSError, ValueError):
        return rank_of(Path(f"/proc/{pid}/fd/1").readlink())
    return None


def _show(output: Output) -> None:
    try:
        output.show()
    except OSError as error:  # nobody reads it, or the disk is full: the run continues
        if error.errno in (errno.EIO, errno.EPIPE):  # the terminal or the reader is gone
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for descriptor in (1, 2):
                os.dup2(nowhere, descriptor)
            os.close(nowhere)
