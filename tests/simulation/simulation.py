"""A job on simulated hosts, with faults that a seed chooses, and what must hold meanwhile.

The batch process, the supervisors, their heartbeats, the table of restarts and the records are the
launcher's own. `simulate(seed)` returns a `Result`; the same seed always gives the same one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import re
import signal
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

from simulated_disk import ROOT, Client
from simulated_hosts import STEP, Cluster, Fault, Host, Ranks
from simulated_slurm import JOB, Slurm, environment
from simulated_time import Process, StuckError
from stand_ins import installed

from rollcall.launch.batch import batch
from rollcall.launch.node import batch_process, supervise
from rollcall.launch.node.heartbeat import BEGIN, LEFT
from rollcall.launch.node.identity import Node
from rollcall.launch.runs import resolve, root_cause
from rollcall.records.attempt import AttemptRecord
from rollcall.records.job import JobRecord, Restart
from rollcall.records.run_dir import RunDir

RUN = f"{ROOT}/run"
WORDS = ("supervise", f"--run-dir={RUN}", "--", "-m", "train", "digits")
PER_NODE = 2
LONGEST = 3000.0
"""Seconds of a simulation, at most."""
NOTICE = 60.0
"""Seconds within which the other nodes must leave the step of a node that died, not counted those
for which disks stall or hosts stand still."""
WELL = 15.0
"""Seconds for which a node must have been well to be taken for lost without a reason."""
LATE = 1.5
"""Seconds after which everybody must know of a claim, not counted pauses and late names."""
LINES = 20
"""Lines of a story."""
OF_RANKS = ("raise", "exit", "kill-rank", "hang", "stop-rank")
OF_NODES = ("kill-supervisor", "power-off")
OF_HOSTS = ("stall", "stall-all", "stop-supervisor", "freeze", "cut", "full", "broken")
OF_JOBS = ("preempt", "kill-batch", "stop-batch")
KINDS = (*OF_RANKS, "kill-agent", *OF_NODES, *OF_NODES, *OF_HOSTS, *OF_JOBS)


@dataclass
class Scenario:
    """What happens in a simulation."""

    seed: int
    nodes: int
    spares: int
    fewest: int | None  # nodes of an elastic job; None if it is none
    steps: int
    faults: list[Fault]
    latency: float = 0.001  # seconds of a file operation
    visibility: float = 0.0  # seconds for which names may be out of date

    @classmethod
    def of_seed(cls, seed: int, fewest: int = 2, most: int = 5) -> Scenario:
        random = Random(seed)
        nodes = random.randint(fewest, most)
        spares, least = random.choice(((0, None), (0, None), (1, None), (2, None), (0, 1)))
        steps, count = random.choice((30, 60, 120)), random.choice((0, 1, 1, 1, 2, 2, 3, 4))
        begin, spread = random.uniform(0.5, STEP * steps), random.choice((2.0, 10.0, 60.0))
        times = [begin + random.uniform(0, spread) for _ in range(count)]
        faults = [_fault(random, when, nodes + spares) for when in times]
        latency = random.choice((0.0003, 0.002, 0.02))
        visibility = random.choice((0.0, 0.0, 1.0, 3.0))
        return cls(seed, nodes, spares, least, steps, faults, latency, visibility)

    def __str__(self) -> str:
        parts = [f"seed {self.seed}: {self.nodes} nodes", f"{self.steps} steps of {STEP} s"]
        parts += [f"{self.spares} spares"] * bool(self.spares)
        parts += ["elastic"] * (self.fewest is not None)
        parts += [f"files {self.latency * 1000:g} ms", f"names late by {self.visibility:g} s"]
        return ", ".join(parts)


def _fault(random: Random, when: float, hosts: int) -> Fault:
    kind, node = random.choice(KINDS), random.randrange(hosts)
    rank = random.randrange(PER_NODE) if kind in OF_RANKS else None
    code = random.choice((1, 2, 3, 77, 127, 255)) if kind == "exit" else -signal.SIGKILL
    blame = rf"\bn{node}\b"
    if kind in ("full", "broken"):
        blame += "|No space|Input/output|could not be written|nothing can be written"
    if kind in OF_JOBS:
        blame = "SIGTERM|batch"
    seconds = random.uniform(1, 30 if "stall" in kind else random.choice((30, 120)))
    return Fault(when, kind, node, blame, seconds, rank, code)


@dataclass
class Result:
    """How a simulation ended."""

    scenario: Scenario
    broken: list[str]  # invariants
    story: list[str]
    end: str  # the verdict, or `requeue`
    events: int
    seconds: float
    noticed: list[float]  # seconds from the death of a node until another one acted on it
    operations: Counter[tuple[int, int, str]]  # on the disk: by second, host and call


@dataclass
class Member:
    """A supervisor of a step."""

    step: str
    number: int
    host: Host
    process: Process
    server: Ranks
    died: float | None = None  # by a fault
    ended: float | None = None
    supervisor: Any = None


@dataclass
class Simulation:
    """A job in a cluster."""

    scenario: Scenario
    broken: list[str] = field(default_factory=list)
    noticed: list[float] = field(default_factory=list)
    members: dict[Process, Member] = field(default_factory=dict)
    unwell: dict[str, float] = field(default_factory=dict)  # until when a host was, by its name
    numbers: dict[Process, int] = field(default_factory=dict)  # of batch processes
    claimed: list[float] = field(default_factory=list)  # when each number was taken, from 1 on
    is_done: bool = False
    done_at: float = 0.0

    def __post_init__(self) -> None:
        scenario = self.scenario
        count = scenario.nodes + scenario.spares
        self.cluster = Cluster(scenario.seed, count)
        self.cluster.clock.most_events *= count
        may_lose = count > (scenario.fewest or scenario.nodes)
        self.slurm = Slurm(self.cluster, self._supervise, self._check_step, may_lose)
        for host in self.cluster.hosts:
            host.client.latency, host.client.visibility = scenario.latency, scenario.visibility
        self.cluster.disk.writes.append(self._written)
        self._aware: set[tuple[str, str]] = set()  # who knows of whose death

    def go(self) -> Result:
        clock, members, note_number = self.cluster.clock, self.members, self._note_number

        class BatchHeartbeat(batch_process.BatchHeartbeat):
            def __init__(self, run: RunDir, start: str, number: int, *rest: Any) -> None:
                note_number(number)
                super().__init__(run, start, number, *rest)

        class Supervisor(supervise.Supervisor):
            def __post_init__(self) -> None:
                members[clock.task().process].supervisor = self
                super().__post_init__()

        with (
            installed(self.cluster, self.slurm),
            mock.patch.object(supervise, "Supervisor", Supervisor),
            mock.patch.object(batch, "BatchHeartbeat", BatchHeartbeat),
            mock.patch.object(self.cluster, "wait_for_signal", self._listen),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())),
        ):
            clock.spawn(self.cluster.start(self.cluster.hosts[0], "submit"), self._submit)
            for fault in self.scenario.faults:
                clock.at(fault.when, functools.partial(self._plant, fault))
            try:
                clock.run(LONGEST, self._is_finished)
                login = self.cluster.start(Host(-1, "login", Client(0.0)), "why")
                clock.spawn(login, lambda: self._judge(login))
                clock.run(clock.now + 60, lambda: login.is_dead)
            except StuckError as error:
                self._break(f"the run never ends: {error}")
            except Exception as error:
                self._break(f"{type(error).__name__}: {error}")
                self.error = error
            finally:
                clock.close()
        end = "requeue" if self.slurm.is_requeued and not self.is_done else self._state()
        operations = self.cluster.disk.operations
        figures = (self._story(), end, clock.events, clock.now, self.noticed, operations)
        return Result(self.scenario, self.broken, *figures)

    def _submit(self) -> None:
        scenario, run = self.scenario, RunDir(ROOT, "run")
        run.create()
        run.job.mkdir()
        record = JobRecord(RUN, scenario.nodes, True, scenario.spares, scenario.fewest)
        record.more["command"] = list(WORDS)
        record.write(run.path)
        srun = ["srun", f"--nodes={scenario.nodes}", f"--ntasks={scenario.nodes}", *WORDS]
        count = scenario.nodes + scenario.spares
        self.slurm.begin([f"--run-dir={RUN}", *srun], environment(count))

    def _supervise(self, process: Process, number: int, key: str, hosts: Sequence[str]) -> int:
        """Be the supervisor of a node; return its exit code."""
        host: Host = process.host
        node = Node(number, len(hosts), tuple(hosts), JOB, key, None, PER_NODE)
        server = Ranks(self.cluster, host, RunDir(ROOT, "run"), self.scenario.steps, PER_NODE)
        self.members[process] = member = Member(key, number, host, process, server)
        options = resolve.parser().parse_args(WORDS[1:])
        ranks: Any = (PER_NODE,) * len(hosts)
        code = supervise._supervise(options, node, ranks, server)  # type: ignore[arg-type]
        member.ended = self.cluster.clock.now
        self.cluster.say(f"node {number} ({host.name}) ends with exit code {code}")
        return code

    def _is_finished(self) -> bool:
        if self.slurm.state == "RUNNING":
            return False
        processes = (process for host in self.cluster.hosts for process in host.processes)
        return all(process.is_dead for process in processes)

    # Faults

    def _plant(self, fault: Fault) -> None:
        cluster, host, kind = self.cluster, self.cluster.hosts[fault.node], fault.kind
        now, until = cluster.clock.now, cluster.clock.now + fault.seconds
        live = [m for m in self.members.values() if m.host is host and not m.process.is_dead]
        member = live[-1] if live else None
        of_host = kind in (*OF_HOSTS, "power-off")
        if host.is_off or self.is_done or (member is None and not of_host and kind not in OF_JOBS):
            return
        server = member.server if member is not None else None
        if fault.rank is not None or kind == "kill-agent":
            if server is None or not server.is_alive or not server.has_met:
                return  # there are no ranks at this time
            if fault.rank is not None:
                rank = server.number * PER_NODE + fault.rank
                fault.blame = rf"rank {rank} on n{fault.node}\b|on n{fault.node} .*rank {rank}\b"
        what = f"{kind} of {host.name}" + f", rank {fault.rank}" * (fault.rank is not None)
        cluster.say(what + f" for {fault.seconds:.1f} s" * (kind in OF_HOSTS))
        fault.hit = now
        if kind in ("raise", "exit", "hang"):
            assert server is not None and fault.rank is not None
            server.planted[fault.rank] = fault
        elif kind in ("kill-rank", "stop-rank"):
            assert server is not None and fault.rank is not None
            number = signal.SIGKILL if kind == "kill-rank" else signal.SIGSTOP
            with contextlib.suppress(ProcessLookupError):
                cluster.kill(server.ranks[fault.rank].pid, number)
        elif kind == "kill-agent":
            assert server is not None
            server.kill_agent_process()
        elif kind in OF_NODES:
            for peer in live:
                peer.died = now
            if kind == "power-off":
                cluster.power_off(host)
            else:
                assert member is not None
                cluster.end(member.process)
        elif kind == "stall":
            host.client.stalled_until = until
        elif kind == "stall-all":
            cluster.disk.stalled_until = until
        elif kind == "stop-supervisor" and member is not None:
            self.unwell[host.name] = now + 6.0
            self._stop(member.process, 6.0)  # then its ranks' parent wakes it
        elif kind == "freeze":
            self.unwell[host.name] = until
            cluster.freeze(host, fault.seconds)
        elif kind == "cut":
            self.unwell[host.name] = host.cut_until = until
        elif kind in ("full", "broken"):
            host.client.error = errno.ENOSPC if kind == "full" else errno.EIO
            host.client.broken_until = until
        elif kind == "preempt":
            self.slurm.preempt()
        elif kind == "kill-batch":
            cluster.end(self.slurm.batch[-1])
        elif kind == "stop-batch":
            self._stop(self.slurm.batch[-1], 600.0)

    def _stop(self, process: Process, seconds: float) -> None:
        def wake() -> None:
            self.slurm.signal(process, signal.SIGCONT)

        self.slurm.signal(process, signal.SIGSTOP)
        self.cluster.clock.at(self.cluster.clock.now + seconds, wake)

    # What must hold

    def _break(self, text: str) -> None:
        if text not in self.broken:
            self.broken.append(text)
            self.cluster.say(f"BROKEN: {text}")

    def _listen(self, seconds: float, numbers: Container[int]) -> int | None:
        """Look at what a supervisor believes, each time that it waits."""
        member = self.members.get(self.cluster.clock.task().process)
        supervisor = member.supervisor if member is not None else None
        if member is not None and supervisor and hasattr(supervisor, "monitor"):
            failure = supervisor.monitor.failure
            is_own = failure is not None and failure.reason == "the other nodes have ended"
            if failure is not None and failure.is_lost and not is_own:
                self._check_lost(member, failure.host)
            self._check_ranks(member)
        return Cluster.wait_for_signal(self.cluster, seconds, numbers)

    def _check_lost(self, by: Member, name: str) -> None:
        """A node that runs is not obeyed as lost."""
        now = self.cluster.clock.now
        peers = [m for m in self.members.values() if m.step == by.step and m.host.name == name]
        died = peers[0].died if peers else None
        if died is not None and (by.step, name) not in self._aware:
            self._aware.add((by.step, name))
            self.noticed.append(now - died)
        is_well = peers and not peers[0].process.is_dead and not peers[0].process.is_halted
        if is_well and now > self.unwell.get(name, -WELL) + WELL:
            self._break(f"{by.host.name} obeys the report that {name} is lost, which runs")

    def _check_ranks(self, member: Member) -> None:
        """No host runs the ranks of two attempts."""
        for other in self.members.values():
            is_here = other.host is member.host and other is not member
            if is_here and other.server.is_alive and member.server.is_alive:
                self._break(f"{member.host.name} runs the ranks of two attempts")

    def _check_step(self, process: Process, hosts: Sequence[Host]) -> None:
        """Only the newest batch process starts a step, and only where the one before has ended."""
        later = self.claimed[self.numbers.get(process, 0) :]
        if later and self._must_know(later[0]):
            self._break(f"{process.host.name} starts a step, but its batch process was replaced")
        for member in self.members.values():
            is_left = member.ended is None and not member.process.is_dead
            is_left = is_left and not self._has_written_its_end(member)
            if member.host in hosts and (is_left or member.server.is_alive):
                self._break(f"a step starts on {member.host.name}, where another one runs")

    def _has_written_its_end(self, member: Member) -> bool:
        """Return True if a node that has lost its head has said that its part of the attempt ended.

        Such a node starts no ranks any more.
        """
        of_step = [other for other in self.members.values() if other.step == member.step]
        heads = [other for other in of_step if other.number == 0]
        has_head = any(head.ended is None and not head.process.is_dead for head in heads)
        if member.server.world is None or member.number == 0 or has_head:
            return False
        path = f"{RUN}/job/attempt-{member.server.world.attempt}/node-{member.number}.json"
        text = self.cluster.disk.peek(path) or b""
        return b'"ended": ' in text and b'"ended": null' not in text

    def _note_number(self, number: int) -> None:
        """Each claim belongs to one batch process."""
        process = self.cluster.clock.task().process
        if any(held == number and other is not process for other, held in self.numbers.items()):
            self._break(f"two batch processes have the claim {number}")
        self.numbers[process] = number

    def _must_know(self, since: float) -> bool:
        """Return True if a claim of this time is known to all: pauses since then do not count."""
        now, pauses = self.cluster.clock.now, 0.0
        for fault in self.scenario.faults:
            if fault.hit is not None and fault.kind in (*OF_HOSTS, "stop-batch"):
                end = fault.hit + (600.0 if fault.kind == "stop-batch" else fault.seconds)
                pauses += max(0.0, min(now, end) - max(since, fault.hit))
        return now - since - pauses > LATE + self.scenario.visibility

    def _written(self, path: str) -> None:
        if path == f"{RUN}/job/heartbeats/{JOB}.0.batch-{len(self.claimed) + 1}":
            self.claimed.append(self.cluster.clock.now)
        if path.startswith((f"{RUN}/verdict", f"{RUN}/checkpoints/")):
            self._check_claim()
        if path == f"{RUN}/verdict.json":
            is_done = self._state() == "done"
            if self.is_done and not is_done:
                self._break("a finished run is no longer finished")
            if is_done and not self.is_done:
                self.is_done, self.done_at = True, self.cluster.clock.now

    def _check_claim(self) -> None:
        """Only the attempt that claimed the run last writes checkpoints and the verdict."""
        writer = self.cluster.clock.task().process
        for member in self.members.values():
            world = member.server.world
            if world is not None and writer.pid in member.server.pids:
                earlier = [when for when, other in self.cluster.claims if other is not world]
                is_ours = self.cluster.claims and self.cluster.claims[-1][1] is world
                if earlier and not is_ours and self._must_know(earlier[-1]):
                    self._break(f"attempt {world.attempt} writes, but has lost its claim")

    def _state(self) -> str:
        text = self.cluster.disk.peek(f"{RUN}/verdict.json") or b""
        match = re.search(rb'"state": "(\w+)"', text)
        return match[1].decode() if match else ""

    def _judge(self, process: Process) -> None:
        """Compare the end with the faults, as a person on another host sees it."""
        run, hits = RunDir(ROOT, "run"), [f for f in self.scenario.faults if f.hit is not None]
        restarts = Restart.read(run.path)
        causes = [line.reason or f"{line.cause} {' '.join(line.hosts)}" for line in restarts]
        was_killed = any(fault.kind == "kill-batch" for fault in hits)  # as Slurm would say
        has_no_disk = any(fault.kind in ("full", "broken") for fault in hits)  # for its last words
        # A node alone that comes down before its first attempt begins has no witness.
        is_alone = self.scenario.nodes == 1 and not AttemptRecord.read(run.path)
        is_alone |= self.scenario.nodes == 1 and has_no_disk
        if not (self.is_done or self.slurm.is_requeued or was_killed):
            causes.append(str(root_cause.of_newest(run)))
        for cause in causes:
            first = cause.splitlines()[0]
            self.cluster.say(f"cause: {first}")
            is_unsaid = first == "the cause is unknown" and (has_no_disk or is_alone)
            if not is_unsaid and not any(self._explains(fault, cause) for fault in hits):
                self._break(f"the cause is wrong: {first}")
        deaths = extra = sum(
            fault.kind in OF_NODES for fault in hits
        )  # seen as a crash first, often
        lasting = ("full", "broken", "cut", "freeze")  # may bring down more than one attempt
        extra += sum(1 + int(f.seconds / 30) for f in hits if f.kind in lasting)
        if sum(cause != "more hosts " for cause in causes) > len(hits) + extra:
            self._break(f"{len(causes)} restarts or ends, but only {len(hits)} faults")
        refuses = any(fault.code in (2, 77) for fault in hits)  # the request, or its claim
        has_ended = not (self.is_done or self.slurm.is_requeued)
        if has_ended and len(hits) == 1 and not (refuses or is_alone):
            self._break("one fault ends the run")
        steps = Counter(line.step for line in restarts if line.cause == "crash")
        if steps and max(steps.values()) >= 3:
            self._break("the ranks restart without an end")
        ends = [m.ended for m in self.members.values() if m.ended is not None]
        grace = LEFT + NOTICE if has_no_disk else NOTICE if deaths else NOTICE / 2
        most = self.done_at + grace + self._pauses(hits)
        if self.is_done and ends and max(ends) > most:
            self._break(f"a supervisor runs {max(ends) - self.done_at:.0f} s after the run is done")
        if not self.is_done and not hits:
            self._break(f"an undisturbed run ends as {self._state() or 'nothing'}")
        pauses = self._pauses(hits)
        for member in self.members.values():
            peers = [m for m in self.members.values() if m.step == member.step]
            last = max((m.ended for m in peers if m.ended is not None), default=0.0)
            if member.died is not None and not self.is_done:
                took = last - member.died
                # A host that dies while others are down is found when it does not begin.
                is_late = not self._has_begun(member) or deaths > 1
                if took > NOTICE + pauses + is_late * BEGIN:
                    self._break(f"others ran on for {took:.0f} s after {member.host.name} died")
        is_late = any(m.died is not None and not self._has_begun(m) for m in self.members.values())
        alive = sum(not host.is_off for host in self.cluster.hosts)
        has_guard = self.scenario.spares > 0 and not self.cluster.hosts[-1].is_off
        if self.slurm.was_left and has_guard and alive >= self.scenario.nodes:
            self._break("spare hosts wait for ever")
        if self.noticed and max(self.noticed) > NOTICE + pauses + is_late * BEGIN:
            self._break(f"a dead node was noticed after {max(self.noticed):.0f} s")
        self.cluster.end(process)

    def _has_begun(self, member: Member) -> bool:
        """Return True if the others could see a count of this member."""
        name = f"{RUN}/job/heartbeats/{member.step}/node-{member.number}"
        return bool(self.cluster.disk.peek(name))

    def _pauses(self, hits: list[Fault]) -> float:
        return sum(fault.seconds for fault in hits if fault.kind in OF_HOSTS)

    def _explains(self, fault: Fault, cause: str) -> bool:
        is_cut = fault.kind in ("cut", "freeze") and cause.startswith("hang")
        if is_cut or re.search(fault.blame, cause):
            return True
        # What hits the first host also hits the batch process.
        of_batch = fault.kind in (*OF_JOBS, "full", "broken", "power-off")
        if of_batch and cause.startswith(("preempted", "asked to stop", "lost batch process")):
            return True
        is_lost = fault.kind in (*OF_NODES, "freeze", "cut", "full", "broken", "stop-batch")
        return is_lost and cause in ("lost node ", "more hosts ")

    def _story(self) -> list[str]:
        """Tell what happened, in at most LINES lines."""
        lines = [f"{when:8.2f} s  {text}" for when, text in self.cluster.story]
        if len(lines) >= LINES:
            lines = [*lines[: LINES // 2 - 2], "…", *lines[-LINES // 2 :]]
        return [str(self.scenario), *lines]


def simulate(seed: int, fewest: int = 2, most: int = 5) -> Result:
    """Run the scenario of a seed."""
    return Simulation(Scenario.of_seed(seed, fewest, most)).go()
