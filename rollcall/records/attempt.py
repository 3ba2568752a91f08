"""The files in job/ and logs/ by which the nodes of an attempt meet and report. No torch."""

import contextlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self, TypeAlias

from rollcall.records.run import Line, Whole
from rollcall.system.files import changed, is_there, listed

AGENT, SUPERVISOR = "agent", "supervisor"
"""Writers of a `RankFailure` where the rank itself cannot."""
OUT_OF_MEMORY = "because its control group ran out of memory"
"""In the report of an agent whose rank the kernel killed for its memory."""
LOST_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|"
    r"DistNetworkError|DistBackendError|DistStoreError|Socket Timeout|Timed out waiting|"
    r"recvValue failed|gloo/transport|NCCL|[Ww]ait timeout|Application timeout caused pair closure"
)
"""Matches the message of a rank whose peer or node is gone."""
COUNT_BYTES = 8
"""Length of the count in a heartbeat file."""
ADDRESS_BYTES = 192
"""Size limit of the address after the count."""
PartState: TypeAlias = Literal["running", "finished", "stopped", "failed"]
"""The state of one node's part of an attempt."""


@dataclass(frozen=True)
class AttemptEvent(Line):
    """Written by the head when an attempt starts and when it ends."""

    FILE = "job/attempts.jsonl"

    attempt: int
    job: str
    event: Literal["started", "ended"]
    time: float
    hosts: list[str] | None = None
    ranks: int | None = None
    state: str | None = None
    exit_code: int | None = None


@dataclass(frozen=True)
class AttemptRecord:
    """One start of a run on all its nodes, put together from its events."""

    number: int
    job: str  # the id of its job
    hosts: list[str]  # its nodes, in order; at least one
    ranks: int  # of all nodes together
    started: float  # seconds since 1970
    state: str | None = None  # finished, stopped or failed; None without a written end
    exit_code: int | None = None  # of the head's part
    ended: float | None = None  # seconds since 1970; None without a written end

    @classmethod
    def read(cls, directory: Path) -> list[Self]:
        """Read all attempts, in order."""
        attempts: dict[int, Self] = {}
        for line in AttemptEvent.read(directory):
            number = line.attempt
            if line.event == "started" and line.hosts and line.ranks:
                attempts[number] = cls(number, line.job, line.hosts, line.ranks, line.time)
            elif line.event == "ended" and number in attempts:
                attempts[number] = replace(
                    attempts[number], state=line.state, exit_code=line.exit_code, ended=line.time
                )
        return [attempts[number] for number in sorted(attempts)]


@dataclass(frozen=True)
class NodeState(Whole):
    """One node's part of an attempt, written by its supervisor."""

    FILE = "job/attempt-{attempt}/node-{node}.json"

    attempt: int
    node: int
    host: str
    state: PartState
    started: float  # seconds since 1970, by the node's clock, like `ended`
    supervisor: int  # its process id
    ended: float | None = None
    exit_code: int | None = None
    is_victim: bool = False  # whether its supervisor ended the ranks because another node failed
    asked: str | None = None  # the signal by which its supervisor was asked to stop
    nccl: dict[str, str] | None = None  # what its ranks get for the fabric, see fabrics.toml


def new_attempt(directory: Path, number: int) -> int:
    """Take the first free attempt number from this one, by making its directory of node states."""
    while True:
        with contextlib.suppress(FileExistsError):
            NodeState.path_in(directory, attempt=number, node=0).parent.mkdir(parents=True)
            return number
        number += 1


@dataclass(frozen=True)
class Rendezvous(Whole):
    """The facts that the nodes of one attempt must agree on, published by the head."""

    FILE = "job/rendezvous/{key}.json"  # of the start and the round: earlier ones are not read

    attempt: int  # its number in the run
    host: str  # name of the head node
    address: str  # where the ranks' store listens
    port: int
    ranks_per_node: int  # of node 0


@dataclass(frozen=True)
class NoMoreRounds(Whole):
    """Published by the head in place of a rendezvous when no further attempt follows."""

    FILE = "job/rendezvous/{key}.end"

    reason: str


@dataclass(frozen=True)
class NodeFailure(Whole):
    """The reason why a node left an attempt; of each round, only the first failure is kept."""

    FILE = "job/rendezvous/{key}.failed.json"

    node: int
    host: str
    reason: str  # in words
    leaves: bool = False  # whether it takes no part in another attempt either
    is_lost: bool = False  # whether another node reports it, because this one was silent

    def __str__(self) -> str:
        return f"node {self.node} ({self.host}) failed: {self.reason}"


class GaveUp(NodeFailure):
    """The reason why a supervisor gave up by itself, apart from how its ranks ended."""

    FILE = "job/rendezvous/{key}.node-{node}.gave-up.json"


class Heartbeat:
    """A file with a count that goes up for as long as its writer lives.

    After the count stands where the writer answers questions, see `node/pulse.py`. The file is
    written in place: on NFS, other hosts may see a renamed file late. Writers and readers keep it
    open, because opening and closing files is what loads a shared file system.
    """

    def __init__(self, path: Path) -> None:
        self.address = ""  # the writer's, as last read
        self._path = path
        self._descriptor: int | None = None

    @classmethod
    def of_node(cls, directory: Path, key: str, node: int) -> Self:
        """The heartbeat of a node's supervisor in the start of a run that has this key."""
        return cls(directory / "job" / "heartbeats" / key / f"node-{node}")

    @classmethod
    def of_batch(cls, directory: Path, start: str, number: int) -> Self:
        """The heartbeat of a batch process; `number` as in `BatchRecord`."""
        return cls(directory / "job" / "heartbeats" / f"{start}.batch-{number}")

    @staticmethod
    def newest(directory: Path, start: str = "") -> float:
        """Return when a heartbeat of a run was written last, in seconds since 1970; 0 if none."""
        parts = (listed(directory, f"job/heartbeats/{start}*{below}") for below in ("", "/*"))
        return max((changed(path) for part in parts for path in part), default=0.0)

    def write(self, count: bytes, address: str = "") -> None:
        """Write the count. Nothing is raised, because a full disk must not end a run."""
        try:
            descriptor = self._open(os.O_RDWR | os.O_CREAT)
            os.pwrite(descriptor, count + address.encode(), 0)
            _pass_cache(descriptor)
        except OSError:
            self.close()

    def read(self, is_doubted: bool = False) -> bytes:
        """Return the count; empty without a file."""
        if is_doubted:  # what an open file shows may be out of date
            self.close()
        try:
            descriptor = self._open(os.O_RDONLY)
            _pass_cache(descriptor)
            text = os.pread(descriptor, COUNT_BYTES + ADDRESS_BYTES, 0)
            self.address = text[COUNT_BYTES:].decode(errors="replace") or self.address
            return text[:COUNT_BYTES]
        except OSError:
            self.close()
            return b""

    def close(self) -> None:
        """Close the file; it is opened again when it is needed."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    __del__ = close

    def _open(self, flags: int) -> int:
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self._path, flags, 0o600)
            except FileNotFoundError:  # not before: thousands of nodes would ask for one folder
                if not flags & os.O_CREAT:
                    raise
                for folder in (self._path.parents[1], self._path.parent):  # not a removed run's
                    folder.mkdir(exist_ok=True)
                self._descriptor = os.open(self._path, flags, 0o600)
        return self._descriptor

    def exists(self) -> bool:
        """Return True if there is a writer, or was one."""
        return is_there(self._path)

    def create(self) -> bool:
        """Make the file; return True if this process was the first."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            return True
        return False


def _pass_cache(descriptor: int) -> None:
    """Have this host send what it wrote to an open file, and read it from the file server next."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True)
class RankFailure(Whole):
    """The failure of a rank, written by itself, its parent or supervisor beside its log."""

    FILE = "{who}.failed.json"

    time: float  # seconds since 1970, by the node's clock
    host: str
    exit_code: int  # 128 + n if signal n ended the rank
    error: str  # type and message of the exception, if it was one
    rank: int | None = None  # None if none had started
    who: str = ""  # the writer: `rank-<n>`, AGENT or SUPERVISOR
    node: int | None = None  # its number, known from the directory

    @classmethod
    def of_attempt(cls, logs: Path) -> list[Self]:
        """Read all failures of an attempt from the directory of its logs, by time."""
        failures = []
        for folder in listed(logs, "node-*"):
            node = folder.name.removeprefix("node-")
            for path, failure in cls.read_all(folder).items():
                if node.isdecimal():
                    who = path.name.removesuffix(cls.FILE.removeprefix("{who}"))
                    failures.append(replace(failure, who=who, node=int(node)))
        return sorted(failures, key=lambda failure: failure.time)


@dataclass(frozen=True)
class RankEnd(Line):
    """The end of a rank, in order or not; in its node's log directory, in the order of the ends."""

    FILE = "ends.jsonl"

    time: float  # seconds since 1970, by the node's clock
    rank: int
    exit_code: int  # 128 + n if signal n ended the rank

    @classmethod
    def of_attempt(cls, logs: Path) -> dict[int, Self]:
        """Read the ends of all ranks of an attempt from the directory of its logs, by rank."""
        return {end.rank: end for folder in logs.glob("node-*") for end in cls.read(folder)}


@dataclass(frozen=True)
class RanksAlone(Whole):
    """Written by node 0's agent if all ranks ended in order and none joined a process group."""

    FILE = "alone.json"

    ranks: int  # of all nodes together

    def __str__(self) -> str:
        return f"{self.ranks} ranks ran; none joined a process group"


@dataclass(frozen=True)
class LogSizes(Line):
    """The sizes of the logs of a node's ranks at some time; in the node's log directory."""

    FILE = "times.jsonl"

    time: float  # seconds since 1970, by the node's clock
    sizes: dict[str, int]  # bytes of the logs that grew, by rank
