"""`rollcall supervise -- -m train digits`: the supervisor, one process on every node.

It meets the other nodes in the run directory, starts this node's ranks, passes signals on to them,
and ends them when another node has failed. Then all nodes restart their ranks, if the head decides.

Exit code: 0 done, 75 stopped in order (start it again to continue), 69 another node was lost;
anything else is a failure.
"""

import contextlib
import math
import os
import signal
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rollcall.launch import frameworks
from rollcall.launch.frameworks import roles
from rollcall.launch.node import batch_process, heartbeat, identity, processes
from rollcall.launch.node.monitor import NodeMonitor
from rollcall.launch.node.processes import REQUESTS, ForkClient
from rollcall.launch.node.rendezvous import DEADLINE, Meeting, RendezvousError, route
from rollcall.launch.runs import find, resolve, restarts
from rollcall.launch.runs.decision import MAX_IN_VAIN, RestartFacts, Rule, decide, outcome
from rollcall.messages.refusal import FENCED, REFUSED
from rollcall.records.attempt import AttemptEvent, NodeState, NoMoreRounds, PartState, Rendezvous
from rollcall.records.run import State, Verdict
from rollcall.system import fabric
from rollcall.system.hosts import HostError, ranks_of_nodes
from rollcall.system.process import adopt_orphans, outlast_full_disks
from rollcall.system.timer import Every

if TYPE_CHECKING:
    from rollcall.launch.runs.root_cause import RootCause

FAST_POLL, SLOW_POLL = 0.05, 0.4
"""Seconds between the first looks at what the head has published, and between later ones."""
REPORTS = 5.0
"""Seconds that the head waits for the other nodes' reports, to find the cause of a failure."""
KNOWN = (HostError, RendezvousError, resolve.CommandError, OSError)
"""Errors whose message says enough."""


@dataclass
class Supervisor:
    """This node's part of a run, from the first rendezvous to the exit code."""

    work: resolve.Work
    node: identity.Node
    ranks: Sequence[int]  # of each node
    framework: str
    max_restarts: int | None  # None for as long as they make progress
    server: ForkClient
    roles: Sequence[str] = ()  # of each rank; empty if all do the same

    def __post_init__(self) -> None:
        self.run = self.work.run
        self.meeting = Meeting(self.run, self.node)
        self.monitor = NodeMonitor(self.run, self.node, self.meeting)
        self.nccl = fabric.settings(os.environ)  # what NCCL needs for the fabric, unless set

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
                    code, rule = self._attempt(*self.meeting.publish(self.ranks))
                else:
                    rule, rendezvous = self._await_head(has_finished)
                    if rendezvous is None:
                        early = {"end as stopped": os.EX_TEMPFAIL, "leave": os.EX_UNAVAILABLE}
                        return early.get(rule.action, code)
                    code, rule = self._attempt(rendezvous, None)
                has_finished = code in (0, os.EX_TEMPFAIL)
                if rule.next in ("run over", "node left"):
                    return code
                self.monitor.next_round()
        except Exception as error:
            # OSError: the run directory is gone or full. The others must not wait for us.
            text = str(error) if isinstance(error, KNOWN) else f"{type(error).__name__}: {error}"
            if self.monitor.failure is None:
                with contextlib.suppress(OSError):
                    self.meeting.give_up(text)
            raise
        finally:
            self.server.kill()
            processes.end_orphans()
            verdict = self.run.read_verdict()
            asked = verdict is not None and verdict.state == "requeue"
            if self.node.is_head:
                self.meeting.round += 1
                with contextlib.suppress(OSError):
                    end = NoMoreRounds("the head has ended")
                    end.write(self.run.path, key=self.meeting.key)
            self.monitor.end()
            job = self.monitor.job
            if job is not None and job.batch is not None:
                job.batch.finish(comes_back=asked and code == os.EX_TEMPFAIL)

    def _await_head(self, has_finished: bool) -> tuple[Rule, Rendezvous | None]:
        """Wait for the head; return what follows, and where the nodes of the next round meet."""
        monitor, facts = self.monitor, RestartFacts(finished=has_finished)
        end = monitor.clock.read() + (math.inf if has_finished else DEADLINE)
        longest = heartbeat.SELDOM if has_finished else SLOW_POLL
        pause, look = FAST_POLL, Every(0.0)
        while True:
            message = None
            if look.is_due():
                message, look = self.meeting.read(self.ranks), Every(pause, at_once=False)
                pause = min(2 * pause, longest)
            if isinstance(message, Rendezvous):
                return decide("head awaited", "new round", facts), message
            if message is not None:
                return decide("head awaited", "no more rounds", facts), None
            if monitor.listen(FAST_POLL):
                # The head may be about to start the ranks; without ours its own would not stop.
                pressed = [request.number for request in monitor.requests].count(signal.SIGINT)
                facts = replace(facts, asked=True, insists=pressed > 1)
                rule = decide("head awaited", "asked to stop", facts)
                end = min(end, monitor.clock.read() + (rule.grace or math.inf))
            elif (failure := monitor.failure) is not None:
                rule = decide("head awaited", "node lost" if failure.is_lost else "node failed")
            elif monitor.clock.read() > end:
                rule = decide("head awaited", "time is up", facts)
            else:
                continue
            if rule.action == "give up":
                failure = monitor.failure
                raise RendezvousError(str(failure)) if failure else self.meeting.silence()
            if rule.action == "leave" and not self.meeting.round:
                _say(str(self.meeting.silence()))
            if rule.action != "wait":
                return rule, None

    def _attempt(self, rendezvous: Rendezvous, holder: socket.socket | None) -> tuple[int, Rule]:
        """Run this node's ranks to their end; return the exit code and what follows."""
        number, node = rendezvous.attempt, self.node
        log = self.run.log(number, node.number, sum(self.ranks[: node.number]))
        part = NodeState(number, node.number, node.host, "running", time.time(), os.getpid())
        part = replace(part, nccl=self.nccl)
        self.server.start(self._order(rendezvous, str(log.parent)), holder)
        if holder is not None:
            holder.close()  # the agent has it now
        part.write(self.run.path)  # while the ranks start
        event = AttemptEvent(number, node.job, "started", time.time())
        if node.is_head:
            replace(event, hosts=list(node.hosts), ranks=sum(self.ranks)).append(self.run.path)
        code = self.monitor.follow(self.server, log, comes_back=self.work.is_training)
        verdict = self.run.read_verdict()
        known = verdict.state if verdict else None
        is_asked = bool(self.monitor.requests) or not node.is_head
        state, code = outcome(code, known, self.work.is_training, self._is_cancelled(), is_asked)
        names = (signal.Signals(request.number).name for request in self.monitor.requests)
        part = replace(part, asked=next(names, None), is_victim=self.monitor.is_victim)
        if state == "failed" and self.monitor.failure is None:
            self.meeting.fail(f"its ranks ended with exit code {code}")
            self.monitor.failure = self.meeting.failure()
        now = time.time()
        with contextlib.suppress(OSError):  # a full disk does not change how the ranks ended
            replace(part, ended=now, state=state, exit_code=code).write(self.run.path)
        with contextlib.suppress(OSError):
            if node.is_head:
                end = replace(event, event="ended", time=now, state=state, exit_code=code)
                end.append(self.run.path)
        return self._conclude(state, code)

    def _order(self, rendezvous: Rendezvous, logs: str) -> Mapping[str, Any]:
        """Return the options of the agent; raise HostError if the head cannot be reached."""
        return {
            "env": self._variables(rendezvous.address),
            "framework": self.framework,
            "roles": self.roles,
            "program": self.work.program,
            "master_addr": rendezvous.address,
            "master_port": rendezvous.port,
            "run_id": self.meeting.key,
            "log_dir": logs,
        }

    def _variables(self, address: str) -> dict[str, str]:
        """Return the ranks' variables for their network; the user's own come first."""
        interface = route(self.node, address).interface
        variables = {"GLOO_SOCKET_IFNAME": interface, **self.nccl}
        # A variable would replace what a file of NCCL's says; NCCL avoids lo itself and needs no
        # address on one node. "=" means exactly this interface.
        if interface != "lo" and "NCCL_SOCKET_IFNAME" not in fabric.configured(os.environ):
            variables = {"NCCL_SOCKET_IFNAME": f"={interface}", **variables}
        missing = {name: value for name, value in variables.items() if name not in os.environ}
        world = str(sum(self.ranks))
        return {**missing, "ROLLCALL_WORLD_SIZE": world, "ROLLCALL_RUN_DIR": str(self.run.path)}

    def _is_cancelled(self) -> bool:
        """Return True if a person ended the job: a user's program has not failed then."""
        return not self.work.is_training and self.node.job in find.cancelled(self.run)

    def _conclude(self, state: PartState, code: int) -> tuple[int, Rule]:
        """Return the exit code and what follows; the head decides for all nodes."""
        if code == FENCED and self.work.is_training:  # the run's files are not ours any more
            facts = RestartFacts(fenced=True, not_head=not self.node.is_head)
            return code, decide(state, "ranks ended", facts)
        monitor, failure, trains = self.monitor, self.monitor.failure, self.work.is_training
        has_lost = monitor.has_lost or (state == "failed" and monitor.is_left)
        decides = state == "failed" and self.node.is_head and not has_lost
        cause = self._cause() if decides else None
        monitor.show_rest(is_wanted=cause is None or not cause.clears(rank=0))
        has_refused = cause is not None and cause.is_refusal  # the first one to fail
        facts = RestartFacts(
            not_head=not self.node.is_head,
            node_lost=has_lost,
            leaves=has_refused or (failure is not None and failure.leaves),
            asked=bool(monitor.requests),
            used_up=self.max_restarts is not None and self.meeting.round >= self.max_restarts,
            permanent=cause is not None and restarts.is_permanent(self.run, cause.failure, trains),
            in_vain=decides and trains and restarts.in_vain(self.run, self.node.job, "crash"),
        )
        rule = decide(state, "ranks ended", facts)
        if cause is not None:
            self._act_on(cause, rule, facts.permanent)
        if rule.next in ("run over", "node left"):
            self._conclude_for_user_program(state, code, cause)
        return os.EX_UNAVAILABLE if rule.action == "leave" else code, rule

    def _cause(self) -> "RootCause":
        """Let the other nodes report; find the cause of a failure and print it."""
        from rollcall.launch.runs import root_cause  # here, because few runs need it

        end = self.monitor.clock.read() + REPORTS
        attempt = self.run.next_attempt() - 1  # the newest one
        awaited = list(range(self.node.count))
        while awaited and self.monitor.clock.read() < end:
            part = NodeState.read(self.run.path, attempt=attempt, node=awaited[-1])
            if part is not None and part.state == "running":
                self.monitor.listen(0.05)
            else:  # it has ended, or never began
                awaited.pop()
        cause = root_cause.of_newest(self.run)
        _say(f"rollcall: {cause}")
        return cause

    def _act_on(self, cause: "RootCause", rule: Rule, permanent: bool) -> None:
        """Record that the ranks restart, or the verdict; say so."""
        step, reason = restarts.saved_step(self.run), cause.what
        if rule.action == "start again":
            restarts.note(self.run, self.node.job, "crash", reason=reason)
            _say(f"the ranks restart{f' from the checkpoint of step {step}' if step else ''}")
        elif rule.action == "fail" or (self.work.is_training and not cause.is_refusal):
            if rule.action == "fail" and permanent:
                _say("not restarted, because every attempt would fail in the same way")
            elif rule.action == "fail":
                reason += f" ({MAX_IN_VAIN} times without a new checkpoint)"
            self.run.try_to_conclude(Verdict("failed", step, reason))

    def _conclude_for_user_program(
        self, state: PartState, code: int, cause: "RootCause | None"
    ) -> None:
        """Write the verdict of a submitted program of the user's, which writes none itself."""
        if self.work.is_training or not self.work.is_submitted or not self.node.is_head:
            return
        verdict: State = "done" if state == "finished" else "failed"
        if verdict == "failed" and self.run.read_verdict() is not None:
            return  # `_act_on` has said why
        if state == "failed" and cause is None and self.monitor.job is None:
            cause = self._cause()  # of a lost node, without which no job starts the run again
        if state == "stopped":
            asked = any(request.number != signal.SIGINT for request in self.monitor.requests)
            is_queued_again = asked and self.monitor.job is not None and not self._is_cancelled()
            verdict = "requeue" if is_queued_again else "stopped"
        reason = cause.what if cause is not None else f"the program ended with exit code {code}"
        if state == "finished" and (alone := find.alone(self.run)):
            reason += f"; {alone}"
            _say(
                f"note: {alone}: each did all of the work, unless they connect without MASTER_ADDR"
            )
        with contextlib.suppress(OSError):
            self.run.conclude(Verdict(verdict, 0, reason))


def main(argv: Sequence[str]) -> int:
    """Run this node's part of a run; return the exit code."""
    # Blocked, not handled: from here on no signal is lost, and each is taken when it is useful.
    signal.pthread_sigmask(signal.SIG_BLOCK, [*REQUESTS, signal.SIGCHLD])
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the run outlives the terminal
    adopt_orphans()
    outlast_full_disks()
    options = resolve.parser().parse_args(argv)
    try:
        node = identity.find(os.environ)
        ranks = ranks_of_nodes(options.nproc_per_node or str(node.default_ranks), node.count)
        options.roles = roles.of_ranks(options.roles, sum(ranks)) if options.roles else ()
        shared = {"nnodes": node.count, "node_rank": node.number, "ranks": ranks}
        shared |= {"start_method": options.start_method, "program": resolve.program_of(options)}
    except (identity.NodeError, ValueError) as error:
        return _fail(str(error))
    server = ForkClient(shared, _environment(node, options.modules))  # it imports meanwhile
    try:
        return _supervise(options, node, ranks, server)
    finally:
        server.kill()


def _environment(node: identity.Node, modules: Sequence[str]) -> dict[str, str]:
    """Return the environment of the ranks' parent; `modules` are searched before all others."""
    env = dict(os.environ)
    if modules:
        searched = [*modules, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, searched))
    if node.gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = node.gpus
    return env


def _supervise(
    options: Namespace, node: identity.Node, ranks: Sequence[int], server: ForkClient
) -> int:
    try:
        work = resolve.work_of_supervisor(options, os.environ, node.job)
    except ValueError as error:
        return _fail(str(error))
    run = work.run
    if work.directory is not None and (text := resolve.finished(run)):
        print(text)
        return 0
    max_restarts = options.max_restarts
    if work.is_training:
        work = replace(work, program=(*work.program, *run.words))
    elif max_restarts is None:
        max_restarts = 0  # only its author knows whether restarting it makes progress
    try:
        run.create()
        guess = "tensorflow" if options.roles else frameworks.guess(work.program)
        framework = options.framework or guess
        supervisor = Supervisor(work, node, ranks, framework, max_restarts, server, options.roles)
        code = supervisor.go()
    except KNOWN as error:
        return _fail(f"node {node.number} ({node.host}): {error}")
    if code == os.EX_UNAVAILABLE and not node.is_head:
        failure = supervisor.monitor.failure
        batch_process.take_over(run, node.job, node.host, failure.host if failure else None)
    return code


def _fail(message: str) -> int:
    _say(f"rollcall: error: {message}")
    return REFUSED


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it, or the disk is full
        print(text, file=sys.stderr, flush=True)
