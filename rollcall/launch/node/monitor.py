"""Look after the ranks of a node, the other nodes and the job, until the ranks end."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rollcall.launch.node import processes
from rollcall.launch.node.batch_process import BatchWatcher, record_of
from rollcall.launch.node.heartbeat import LEFT, Heartbeats, interval, patience
from rollcall.launch.node.identity import Node
from rollcall.launch.node.processes import ForkClient, SignalDelivery
from rollcall.launch.node.rendezvous import Meeting
from rollcall.launch.runs.decision import RESCUE, RestartEvent, RestartFacts, decide
from rollcall.launch.runs.output import LogWatcher, Output, rank_of
from rollcall.launch.scheduler import slurm
from rollcall.records.attempt import SUPERVISOR, NodeFailure, RankFailure
from rollcall.records.job import JobRecord
from rollcall.records.run import JobEnd, LoggedStep
from rollcall.records.run_dir import RunDir
from rollcall.system.process import StoppedProcesses, redirect_output, rescues, wait_for_signal
from rollcall.system.timer import Every, RunningClock

TICK = 0.25
"""Seconds between two looks at the log and the agent."""
HOLD = 3.0
"""Seconds for which a traceback of the head's first rank is held back, until it is clear that it is
not a victim's: the agent gives the other ranks two seconds."""
PEER_CHECK = 2.0
"""Seconds between two looks at whether another node has failed, if no heartbeat says so."""
DIRECTORY_CHECK = 10.0
"""Seconds between two looks at whether the run directory still exists."""
REFUTATION = 5.0
"""Intervals of the heartbeats that a node has to refute the report that it is lost."""
ASK_EVERY = 300.0
"""Seconds between two questions for the job's end, because a time limit can be changed."""
TELL_EVERY = 30.0
"""Seconds between two changes of the job's comment."""
SOON = 10.0
"""Seconds until the next try, if Slurm did not answer or no step was logged."""


class NodeMonitor:
    """The ranks, signals and other nodes that a supervisor watches, over all attempts."""

    def __init__(self, run: RunDir, node: Node, meeting: Meeting) -> None:
        self.requests: list[SignalDelivery] = []  # that asked to stop
        self.failure: NodeFailure | None = None  # of a node in this round
        self.is_victim = False  # whether this round's ranks were ended because of another node
        self.clock = RunningClock()
        self.job: JobWatcher | None = None
        if node.is_head:
            JobEnd.path_in(run.path).unlink(missing_ok=True)  # an earlier job's
            self.job = JobWatcher(run, node) if "SLURM_JOB_ID" in os.environ else None
        self._run, self._node, self._meeting = run, node, meeting
        self._heartbeats = Heartbeats(run, node)
        self._kill_at: float | None = None  # when to kill the ranks, by the clock
        self._output: Output | None = None  # of the head's first rank
        self._peer_check = Every(PEER_CHECK)
        self._directory_check = Every(DIRECTORY_CHECK, at_once=False)
        self._reported: float | None = None  # since when a node is reported as lost, by the clock
        self._there = 0.0  # when the run directory was there last, by the clock
        self._root = _identity(run.path.parent)

    @property
    def has_lost(self) -> bool:
        """True if another node was lost in this round."""
        return self.failure is not None and self.failure.is_lost

    @property
    def is_left(self) -> bool:
        """True if other nodes have ended, because they took this one for lost."""
        return self._heartbeats.have_left(0.0)

    def listen(self, timeout: float) -> bool:
        """Wait for a signal and look at the other nodes; return True if it asks to stop."""
        number = wait_for_signal([*processes.REQUESTS, signal.SIGCHLD], timeout)
        self.clock.read()
        if self._node.count > 1:
            self._look_at_peers()
        asks = number is not None and number != signal.SIGCHLD
        if self.job is not None:  # after a signal or a stop, Slurm may have moved the job's end
            self.job.update(is_end_doubted=asks or self.clock.was_stopped)
        if number is None or not asks:
            return self._directory_check.is_due() and self._is_directory_removed()
        # Slurm repeats signals; only a person's second Ctrl-C means more than the first.
        known = {request.number for request in self.requests}
        if number == signal.SIGINT or number not in known:
            self.requests.append(SignalDelivery(number))
        self._saw("asked to stop")
        return True

    def next_round(self) -> None:
        """Forget the round that has failed."""
        self._meeting.round += 1
        self.failure = self._kill_at = self._reported = None
        self.is_victim = False

    def end(self) -> None:
        """Tell the other nodes that this one takes no further part."""
        self.show_rest(is_wanted=True)
        self._heartbeats.end(has_failed=self.failure is not None)

    def _look_at_peers(self) -> None:
        has_failed = self.failure is not None or self._reported is not None
        silent, is_told = self._heartbeats.look(has_failed)
        if self.failure is None and self._heartbeats.have_left(LEFT):
            # No report: the next step of the job may run on the other nodes by now.
            name, reason = self._node.host, "the other nodes have ended"
            self.failure = NodeFailure(self._node.number, name, reason, leaves=True, is_lost=True)
            self._saw("node lost")
        is_quiet = silent is None and not is_told and self._reported is None
        if self.failure or (is_quiet and not self._peer_check.is_due()):
            return
        if silent is not None:
            self._meeting.report_lost(silent)
            self._heartbeats.begin_anew(silent)
        failure = self._meeting.failure()
        if failure is not None and failure.is_lost:
            if failure.node == self._node.number:
                self._meeting.refute()
                name = f"node {failure.node} ({failure.host})"
                print(f"{name}: was reported as lost, but it runs", file=sys.stderr, flush=True)
                return
            if self._reported is None:
                self._reported = self.clock.read()
            if self.clock.read() - self._reported < REFUTATION * interval(self._node.count):
                return
        self.failure, self._reported = failure, None
        if self.failure:
            self._saw("node lost" if self.failure.is_lost else "node failed")

    def _is_directory_removed(self) -> bool:
        """Return True if the run is to stop now, because somebody has removed its directory."""
        now, is_gone = self.clock.read(), False
        try:
            self._run.job.stat()
        except OSError as error:  # another error says nothing, nor does a disk that is not mounted
            is_gone = error.errno == errno.ENOENT and _identity(self._run.path.parent) == self._root
        self._there = self._there if is_gone else now
        if now - self._there < patience() or self.requests:
            return False
        self.requests.append(SignalDelivery(signal.SIGINT))  # it is not to be queued again
        self._saw("asked to stop")
        with contextlib.suppress(OSError):
            text = f"rollcall: {self._run.path} was removed: the run stops"
            print(text, file=sys.stderr, flush=True)
        return True

    def _saw(self, event: RestartEvent) -> None:
        grace = decide("attempt runs", event).grace
        if grace is not None:
            end = self.clock.read() + grace
            self._kill_at = end if self._kill_at is None else min(self._kill_at, end)

    def follow(self, server: ForkClient, log: Path, comes_back: bool) -> int:
        """Look after the ranks until the agent ends; return its exit code, 128 + n for signal n.

        `log` is the one of the node's first rank; a run that is asked to stop `comes_back`, or not.
        """
        log_sizes, stopped = LogWatcher(log.parent), StoppedProcesses()
        self._output = output = Output([log] if self._node.is_head else [], True, HOLD)
        has_signalled = False  # that a node is lost
        started: dict[int, float] = {}  # when ranks opened their logs, by the clock
        while (code := server.poll()) is None:
            self.listen(TICK)
            ranks = processes.children(server.agent) if server.agent else []
            if ranks:
                _show(output)
            log_sizes.look(ranks)
            now = self.clock.read()
            new = [pid for pid in ranks if pid not in started and _rank_of(pid) is not None]
            started |= dict.fromkeys(new, now)
            ages = {pid: now - started.get(pid, now) for pid in ranks}
            for request in self.requests:
                request.deliver(ages)
            if self.requests and self.job is not None and self.job.batch is not None:
                self.job.batch.requeue_if_gone(comes_back)
            for pid in stopped.find([*ranks, *server.pids]):
                self._end_stopped(pid, server, log.parent)
            if self.has_lost and not has_signalled:
                has_signalled = processes.tell_node_lost(ranks)
            if self._kill_at is not None and now > self._kill_at:
                saves = now < self._kill_at + RESCUE and any(map(rescues, ranks))
                facts = RestartFacts(rescuing=saves)
                if decide("attempt runs", "time is up", facts).action == "kill the ranks":
                    self.is_victim |= self.failure is not None
                    server.kill_agent()
        processes.end_orphans(keep=server.pids)
        _show(output)
        log_sizes.end()
        return code

    def show_rest(self, is_wanted: bool) -> None:
        """Print the traceback that was held back; of a victim, only where it is."""
        if self._output is not None:
            _show(self._output, is_wanted)
            self._output = None

    def _end_stopped(self, pid: int, server: ForkClient, logs: Path) -> None:
        """Kill a process that somebody stopped, after writing down that this is the cause."""
        rank = None if pid in server.pids else _rank_of(pid)
        who = "the parent of the ranks" if rank is None else f"rank {rank}"
        after = f"{StoppedProcesses.LIMIT:.0f} s"
        error = f"{who} was stopped, as by SIGSTOP, so it was killed after {after}"
        host, code = self._node.host, processes.KILLED
        failure = RankFailure(time.time(), host, code, error, rank, SUPERVISOR)
        with contextlib.suppress(OSError):
            failure.write(logs)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class JobWatcher:
    """The head's watch over its job: it keeps the end up to date, and a comment (squeue -o %k).

    Slurm's controller may be away for minutes; that never affects the run.
    """

    def __init__(self, run: RunDir, node: Node) -> None:
        self._run, self._job = run, node.job
        record = record_of(run, node.job)
        self.batch = BatchWatcher(run, node.job, record) if record else None
        self._ask_timer, self._tell_timer = Every(ASK_EVERY), Every(TELL_EVERY)
        self._question: subprocess.Popen[bytes] | None = None
        self._comment: subprocess.Popen[bytes] | None = None
        self._step = 0
        # A comment that the user gave stays: sites read them, for accounting for example.
        request = JobRecord.read(run.path)
        options = request.more.get("options") if request else None
        self._has_comment = isinstance(options, dict) and "comment" in options

    def update(self, is_end_doubted: bool = False) -> None:
        """Do what is due; `is_end_doubted`: Slurm may have moved the job's end."""
        if is_end_doubted:
            self._ask_timer.make_due()
        self._ask_for_end()
        # The last scontrol may still hang: a controller can be away for minutes.
        is_busy = self._comment is not None and self._comment.poll() is None
        if not self._has_comment and not is_busy and self._tell_timer.is_due():
            self._show_progress()
        if self.batch is not None:
            self.batch.look()

    def _ask_for_end(self) -> None:
        """Ask if it is time to, and write down an answer that has come."""
        if self._question is None and self._ask_timer.is_due():
            with contextlib.suppress(slurm.SlurmError):  # no squeue on the nodes
                self._question = slurm.ask_status(self._job)
        elif self._question is not None and self._question.poll() is not None:
            text = self._question.stdout.read() if self._question.stdout else b""
            self._question = None
            try:
                JobEnd(slurm.read_status(text.decode()).end).write(self._run.path)
            except (ValueError, OSError):  # no answer, or a full disk
                self._ask_timer.make_due(SOON)

    def _show_progress(self) -> None:
        """Write the newest logged step into the comment."""
        newest = LoggedStep.newest(self._run.path)
        if newest is None or newest.step == self._step:
            self._tell_timer.make_due(SOON)
            return
        self._step = newest.step
        text = f"step {newest.step}, loss {newest.loss:.4g}, {newest.samples_per_second:.0f}/s"
        words = ("scontrol", "update", f"JobId={self._job}", f"Comment={text}")
        with contextlib.suppress(slurm.SlurmError):  # no scontrol on the nodes
            self._comment = slurm.in_background(words)


def _rank_of(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return rank_of(Path(f"/proc/{pid}/fd/1").readlink())
    return None


def _show(output: Output, is_wanted: bool | None = None) -> None:
    try:
        output.show() if is_wanted is None else output.show_rest(is_wanted)
    except OSError as error:  # nobody reads it, or the disk is full: the run continues
        if error.errno in (errno.EIO, errno.EPIPE):  # the terminal or the reader is gone
            redirect_output(os.open(os.devnull, os.O_WRONLY))


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return a folder's disk and number there, which a mount changes; None if it is missing."""
    with contextlib.suppress(OSError):
        status = folder.stat()
        return status.st_dev, status.st_ino
    return None
