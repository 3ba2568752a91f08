"""Hosts that die, freeze and lose their network; their processes, sockets and ranks.

`Ranks` is in the place of the fork server: its ranks compute nothing, but start late, meet, step,
save, fail, hang and lose each other, and leave the records that real ones leave.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from simulated_disk import Client, Disk
from simulated_time import Clock, Process, Task

from rollcall.launch.runs.decision import first_to_fail, has_failed
from rollcall.messages.refusal import FENCED
from rollcall.records.attempt import AGENT, NodeState, RankEnd, RankFailure
from rollcall.records.run_dir import FencedError, RunDir, Verdict
from rollcall.system.timer import Every

STEP = 0.5
"""Seconds of a step of the simulated training."""
SAVE_EVERY = 10
"""Steps between two checkpoints."""
HANG = 40.0
"""Seconds without a step after which the training's watchdog ends the ranks."""
LEAVE_LOOK = 5.0
"""Seconds between two looks at whether the other nodes have written their ends."""
FIRST_PID = 5_000_000
"""The first process id; the kernel's are smaller."""


@dataclass(eq=False)
class Host:
    """A host: its processes, its view of the file system, and its network."""

    number: int
    name: str
    client: Client
    processes: list[Process] = field(default_factory=list)
    is_off: bool = False
    off_since: float = math.inf
    is_frozen: bool = False  # as a whole, like a virtual machine that is being moved
    cut_until: float = 0.0  # its network carries nothing until then


class Cluster:
    """The hosts of a run."""

    def __init__(self, seed: int, count: int) -> None:
        self.random = Random(seed)
        self.clock = Clock()
        self.disk = Disk(self.clock, Random(seed))
        self.hosts = [Host(number, f"n{number}", Client()) for number in range(count)]
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.worlds: dict[str, World] = {}
        self.claims: list[tuple[float, World]] = []  # when each attempt claimed the run
        self.processes: dict[int, Process] = {}
        self.children: dict[int, list[int]] = {}  # of a process, by its id
        self.logs: dict[int, str] = {}  # of the ranks, by process id
        self.story: list[tuple[float, str]] = []
        self._port = 40000

    def host(self) -> Host:
        host: Host = self.clock.task().process.host
        return host

    def start(self, host: Host, name: str) -> Process:
        process = Process(host, name, FIRST_PID + len(self.processes))
        self.processes[process.pid] = process
        host.processes.append(process)
        return process

    def say(self, text: str) -> None:
        self.story.append((self.clock.now, text))

    def new_port(self) -> int:
        self._port += 1
        return self._port

    def reach(self, host: Host, other: Host) -> bool:
        """Return True if packets pass between two hosts."""
        is_cut = self.clock.now < max(host.cut_until, other.cut_until)
        return host is other or not (is_cut or other.is_off or other.is_frozen or host.is_off)

    def wait_for_signal(self, seconds: float, numbers: Container[int]) -> int | None:
        """Take one of these signals; others stay pending."""
        process, end = self.clock.task().process, self.clock.now + seconds
        while True:
            for at, number in enumerate(process.signals):
                if number in numbers:
                    return process.signals.pop(at)
            if self.clock.now >= end:
                return None
            process.waiter = self.clock.task()
            self.clock.park(end - self.clock.now)
            process.waiter = None

    def when_reached(self, host: Host, action: Callable[[], object]) -> None:
        """Do something on a host once it is neither frozen nor cut off; never if it is off."""
        if host.is_frozen or self.clock.now < host.cut_until:
            self.clock.at(self.clock.now + 1.0, lambda: self.when_reached(host, action))
        elif not host.is_off:
            action()

    def kill(self, pid: int, number: int) -> None:
        """Send a signal to a process."""
        process = self.processes.get(pid)
        if process is None or process.is_dead:
            raise ProcessLookupError
        if number == signal.SIGKILL:
            self.end(process)
        elif number == signal.SIGSTOP:
            process.is_stopped = True
        elif number == signal.SIGCONT:
            process.is_stopped = False
            self.clock.resume(process)
        else:
            process.signals.append(number)
            self.clock.wake(process.waiter)

    def end(self, process: Process) -> None:
        """End a process, and all that die with it; its sockets close."""
        if process.is_dead:
            return
        process.is_dead = True
        for listener in [known for known in self.listeners.values() if known.owner is process]:
            listener.close()
        for pid in self.children.pop(process.pid, []):
            self.end(self.processes[pid])

    def power_off(self, host: Host) -> None:
        host.is_off, host.off_since = True, self.clock.now
        for process in host.processes:
            process.is_dead = True
        self.disk.close_all_of(host.client)

    def freeze(self, host: Host, seconds: float) -> None:
        host.is_frozen = True

        def thaw() -> None:
            host.is_frozen = False
            for process in host.processes:
                self.clock.resume(process)

        self.clock.at(self.clock.now + seconds, thaw)

    def proc(self, call: str, path: str, real: Callable[[], Any]) -> Any:
        """Answer for a file of /proc, of simulated processes only."""
        if path == "/proc/self/fd/1":
            return "/sim/output"
        if path == "/proc/self/ns/pid":
            return f"pid:[{self.host().number}]"
        match = re.match(r"/proc/(\d+)/(.*)", path)
        if match is None or int(match[1]) < FIRST_PID:
            return real()
        pid, what = int(match[1]), match[2]
        process = self.processes[pid]
        if process.is_dead:
            raise FileNotFoundError
        if what == "task":
            return [str(pid)]
        if what.endswith("/children"):
            known = self.children.get(pid, [])
            return " ".join(str(child) for child in known if not self.processes[child].is_dead)
        if what == "stat":
            return f"{pid} (x) {'T' if process.is_stopped else 'S'} {'1 ' * 20}"
        if what == "status":
            return "SigIgn:\t0\nSigCgt:\tffffffff\n"
        if pid not in self.logs:
            raise FileNotFoundError
        return self.logs[pid] if call == "readlink" else "pos:\t0\n"


class Listener:
    """A socket that listens, or holds a port."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.owner = cluster.clock.task().process
        self.queue: deque[Connection] = deque()
        self._waiter: Task | None = None
        self._address: tuple[str, int] | None = None
        self._is_closed = False

    def bind(self, address: tuple[str, int]) -> Listener:
        port = address[1] or self._cluster.new_port()
        if (address[0], port) in self._cluster.listeners:
            raise OSError
        self._address = (address[0], port)
        self._cluster.listeners[self._address] = self
        return self

    def getsockname(self) -> tuple[str, int]:
        assert self._address is not None
        return self._address

    def accept(self) -> tuple[Connection, None]:
        while not self.queue:
            if self._is_closed:
                raise OSError
            self._waiter = self._cluster.clock.task()
            self._cluster.clock.park()
        return self.queue.popleft(), None

    def push(self, connection: Connection) -> None:
        self.queue.append(connection)
        self._cluster.clock.wake(self._waiter)

    def shutdown(self, _: int) -> None:
        self.close()

    def close(self) -> None:
        self._is_closed = True
        if self._address is not None:
            self._cluster.listeners.pop(self._address, None)
        self._cluster.clock.wake(self._waiter)


class Connection:
    """One end of a connection."""

    def __init__(self, cluster: Cluster, host: Host) -> None:
        self._cluster, self.host, self.other = cluster, host, self
        self._data, self._is_closed = b"", False
        self._waiter: Task | None = None
        self._timeout: float | None = None

    @classmethod
    def open(cls, cluster: Cluster, address: tuple[str, int], timeout: float) -> Connection:
        here = cluster.host()
        there = next(host for host in cluster.hosts if host.name == address[0])
        if not cluster.reach(here, there):
            cluster.clock.sleep(timeout)
            raise TimeoutError
        cluster.clock.sleep(0.001)
        listener = cluster.listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError
        ours, theirs = cls(cluster, here), cls(cluster, there)
        ours.other, theirs.other, ours._timeout = theirs, ours, timeout
        listener.push(theirs)
        return ours

    def settimeout(self, seconds: float) -> None:
        self._timeout = seconds

    def sendall(self, data: bytes) -> None:
        if self._cluster.reach(self.host, self.other.host):
            self.other._data += data
            self._cluster.clock.wake(self.other._waiter)

    def recv(self, size: int) -> bytes:
        if not self._data and not self._is_closed:
            self._waiter = self._cluster.clock.task()
            self._cluster.clock.park(self._timeout)
            self._waiter = None
            if not self._data and not self._is_closed:
                raise TimeoutError
        data, self._data = self._data[:size], self._data[size:]
        return data

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.other._is_closed = True
        self._cluster.clock.wake(self.other._waiter)


@dataclass(eq=False)
class World:
    """The ranks of an attempt, once they have met."""

    count: int  # nodes
    attempt: int
    agents: dict[int, Ranks] = field(default_factory=dict)
    step: int = 0
    moved: float = 0.0  # when it made its last step
    is_done: bool = False
    code: int | None = None  # with which all ranks leave, because they agreed to
    left: int = 0  # nodes whose ranks have ended
    saved: list[float] = field(default_factory=list)  # when rank 0 wrote, after it was fenced off

    @property
    def has_met(self) -> bool:
        return len(self.agents) == self.count


@dataclass
class Fault:
    """A planted fault; `blame` matches how the first cause may name it."""

    when: float
    kind: str
    node: int
    blame: str
    seconds: float = 0.0
    rank: int | None = None  # the rank's number on its node
    code: int = 1
    hit: float | None = None  # when it happened


class Ranks:
    """The fork server, the agent and the ranks of a node; in the place of `ForkClient`."""

    def __init__(self, cluster: Cluster, host: Host, run: RunDir, steps: int, per_node: int):
        self.cluster, self.host, self._run = cluster, host, run
        self._steps, self._per_node = steps, per_node
        self._parent = cluster.clock.task().process
        self.agent: int | None = None
        self.ranks: list[Process] = []
        self.planted: dict[int, Fault] = {}  # by the rank's number on the node
        self._process: Process | None = None
        self._ended: list[int] = []
        self.world: World | None = None
        self.number = 0
        self.is_fenced = False

    @property
    def pids(self) -> list[int]:
        return [] if self._process is None or self._process.is_dead else [self._process.pid]

    @property
    def has_met(self) -> bool:
        return self.world is not None and self.world.has_met

    @property
    def is_alive(self) -> bool:
        """True while ranks of this node may still compute or write."""
        return any(not rank.is_dead for rank in self.ranks)

    def start(self, order: Mapping[str, Any], port: Any) -> None:
        del port
        self._ended, self.planted = [], {}
        self._process = process = self.cluster.start(self.host, "agent")
        self.agent = process.pid
        self.cluster.children.setdefault(self._parent.pid, []).append(process.pid)
        self.cluster.clock.spawn(process, lambda: self._agent(process, order))

    def poll(self) -> int | None:
        if self._ended:
            self.agent = None
            return self._ended[0]
        if self._process is None or self._process.is_dead:
            self.kill()
            return 128 + signal.SIGKILL
        return None

    def kill_agent(self) -> None:
        self.kill()

    def kill_agent_process(self) -> None:
        """Kill the agent as somebody else would; the supervisor has to notice."""
        if self._process is not None:
            self.cluster.end(self._process)

    def kill(self) -> None:
        if self._process is not None:
            self.cluster.end(self._process)
        self._process = self.agent = None

    def _agent(self, process: Process, order: Mapping[str, Any]) -> None:
        """Be the parent of the ranks, for one attempt."""
        self._agent_log = logs = Path(order["log_dir"])
        number = int(logs.name.removeprefix("node-"))
        first = number * self._per_node
        clock, random = self.cluster.clock, self.cluster.random
        self.number = number
        clock.sleep(random.uniform(0.2, 4.0))
        with contextlib.suppress(OSError):
            logs.mkdir(parents=True, exist_ok=True)
            for rank in range(self._per_node):
                (logs / f"rank-{first + rank}.log").write_text("")
        self.ranks = [self.cluster.start(self.host, "rank") for _ in range(self._per_node)]
        pids = [rank.pid for rank in self.ranks]
        self.cluster.children[process.pid] = pids
        for at, pid in enumerate(pids):
            self.cluster.logs[pid] = str(logs / f"rank-{first + at}.log")
        try:
            self._meet(order, logs)
            code = self._follow(logs, first)
        except OSError as error:  # no claim can be made
            code = self._report(logs, first, 1, f"OSError: {error}")
        assert self.world is not None
        self.world.left += 1
        if number == 0:  # hosts the store
            others, look = set(range(1, self.world.count)), Every(LEAVE_LOOK, at_once=False)
            while self.world.left < self.world.count and code in (0, os.EX_TEMPFAIL) and others:
                clock.sleep(0.2)
                if look.is_due():
                    others = {node for node in others if not self._has_ended(node)}
        for process_of_rank in self.ranks:
            self.cluster.end(process_of_rank)
        self._ended.append(code)
        process.is_dead = True
        if not self._parent.is_dead:
            self.cluster.kill(self._parent.pid, signal.SIGCHLD)

    def _has_ended(self, node: int) -> bool:
        """Return True if a node's supervisor has written that its part ended in order."""
        assert self.world is not None
        part = NodeState.read(self._run.path, attempt=self.world.attempt, node=node)
        return part is not None and part.state in ("finished", "stopped")

    def _meet(self, order: Mapping[str, Any], logs: Path) -> None:
        attempt = int(logs.parent.name.removeprefix("attempt-"))
        nodes = int(order["env"]["ROLLCALL_WORLD_SIZE"]) // self._per_node
        world = World(nodes, attempt)
        self.world = world = self.cluster.worlds.setdefault(order["run_id"], world)
        world.agents[self.number] = self
        if self.number == 0:
            while not world.has_met:
                self.cluster.clock.sleep(STEP)
            world.moved = self.cluster.clock.now
            self._run.record("started", world_size=nodes * self._per_node)
            self._run.claim(world.attempt)
            self.cluster.claims.append((self.cluster.clock.now, world))

    def _follow(self, logs: Path, first: int) -> int:
        """Wait for the end of the ranks; return the agent's exit code."""
        clock, world = self.cluster.clock, self.world
        assert world is not None
        lost_at, notice = None, self.cluster.random.choice((0.1, 1.0, 3.0, None))
        codes: dict[int, int] = {}
        while True:
            clock.sleep(STEP)
            for at, rank in enumerate(self.ranks):
                if rank.is_dead and at not in codes:  # killed
                    codes[at] = -signal.SIGKILL
                elif rank.signals and at not in codes and not world.is_done:
                    world.code = os.EX_TEMPFAIL
                if at in self.planted and at not in codes and self.planted[at].kind != "hang":
                    codes[at] = self._fail(self.planted.pop(at), logs, first + at)
            if any(codes.values()):
                break
            if world.is_done or world.code is not None:
                codes = dict.fromkeys(range(self._per_node), world.code or 0)
                if self.number == 0 and world.code == os.EX_TEMPFAIL:
                    codes = {0: self._save(world, "requeue", "asked to stop")}
                break
            if self._has_lost(world):
                lost_at = lost_at or clock.now
                if notice is not None and clock.now > lost_at + notice:
                    for at in range(self._per_node):
                        codes[at] = self._report(logs, first + at, 1, "Connection closed by peer")
                    break
            elif self.number == 0 and world.has_met:
                code = self._step(world)
                if code is not None:
                    codes[0] = code
                    if code:
                        break
        for at, code in codes.items():
            with contextlib.suppress(OSError):
                end = RankEnd(_now(), first + at, code if code >= 0 else 128 - code)
                end.append(logs)
            if has_failed(code) and code > 0:
                path = RankFailure.path_in(logs, who=f"rank-{first + at}")
                with contextlib.suppress(OSError):
                    if not path.exists():
                        self._report(logs, first + at, code, "")
        if not any(codes.values()):
            return 0
        first_at = first_to_fail(codes)
        code = codes[first_at] if codes[first_at] > 0 else 128 - codes[first_at]
        if code != os.EX_TEMPFAIL:
            text = f"rank {first + first_at} failed"
            with contextlib.suppress(OSError):
                RankFailure(_now(), self.host.name, code, text, first + first_at, AGENT).write(logs)
        return code

    def _step(self, world: World) -> int | None:
        """Make a step of all ranks, as rank 0; return its exit code if it ends."""
        now = self.cluster.clock.now
        if not all(self._is_well(agent) for agent in world.agents.values()):
            if now - world.moved > HANG:
                hung = next((a for a in world.agents.values() if not self._is_well(a)), self)
                rank = hung.number * self._per_node + min(hung.planted, default=0)
                reason = (
                    f"hang after step {world.step}, no progress: rank {rank} on {hung.host.name}"
                )
                self._run.record("failed", reason=reason)
                world.code = 1
                return 1
            return None
        world.step, world.moved = world.step + 1, now
        if world.step == 1:
            self._run.record("first_step", step=1)
        try:
            if world.step % SAVE_EVERY == 0:
                self._run.check_claim()
                path = self._run.checkpoints / f"step-{world.step + 1000 * world.attempt:08}"
                path.mkdir(parents=True, exist_ok=True)
            if world.step >= self._steps:
                return self._save(world, "done", "trained")
        except FencedError:
            self.cluster.say("rank 0 gave way")
            return FENCED
        except OSError:
            pass  # it tries again at the next step
        return None

    def _save(self, world: World, state: Any, reason: str) -> int:
        failed = self._run.try_to_conclude(Verdict(state, world.step, reason))
        if failed and state == "done":
            return 1 if world.step > self._steps + 40 else None  # type: ignore[return-value]
        world.is_done = world.is_done or state == "done"
        return 0 if state == "done" else os.EX_TEMPFAIL

    def _is_well(self, agent: Ranks) -> bool:
        """Return True if the ranks of a node take part in the next step."""
        if agent.world is not self.world or not self.cluster.reach(self.host, agent.host):
            return False
        if any(fault.kind == "hang" for fault in agent.planted.values()):
            return False
        return all(not (rank.is_dead or rank.is_halted) for rank in agent.ranks)

    def _has_lost(self, world: World) -> bool:
        """Return True if a connection to another rank has closed."""
        return any(
            agent.world is not world or not (agent.is_alive or agent.host.is_off)
            for agent in world.agents.values()
        )

    def _fail(self, fault: Fault, logs: Path, rank: int) -> int:
        fault.hit = self.cluster.clock.now
        if fault.kind == "raise":
            return self._report(logs, rank, 1, "RuntimeError: planted")
        return fault.code

    def _report(self, logs: Path, rank: int, code: int, error: str) -> int:
        report = RankFailure(_now(), self.host.name, code, error, rank, f"rank-{rank}")
        with contextlib.suppress(OSError):
            report.write(logs)
        return code


def _now() -> float:
    import time

    return time.time()
