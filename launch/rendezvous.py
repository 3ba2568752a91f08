"""Where do the nodes of one attempt meet? The head decides and publishes it in the run directory.

No name is resolved that could be the host's own, no clock is compared, and no message is taken from
the network: what the nodes agree on is a file that only the run's owner can write.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.node import Node
from train import hosts
from train.run import RunDir, write_atomic

DEADLINE = 300.0
"""Seconds that a node waits for the head to publish where to meet."""


class RendezvousError(Exception):
    """The nodes cannot meet; the message names the node or host and what to do."""


@dataclass(frozen=True)
class Rendezvous:
    """What the nodes of one attempt must agree on.

    Attributes:
        attempt: number of the attempt in its run.
        host: name of the head node.
        address, port: where rank 0 and the agents' store are.
        ranks_per_node: the same on every node.
    """

    attempt: int
    host: str
    address: str
    port: int
    ranks_per_node: int


def route(node: Node, address: str | None) -> hosts.Route:
    """The address and interface by which this node talks to the others.

    Args:
        node: this node.
        address: of the head, if it is known.

    Raises:
        HostError: another host is not found or reached.
    """
    if node.peer is None:
        return hosts.Route("127.0.0.1", "lo")
    return hosts.route(address or node.peer)


@dataclass(frozen=True)
class Over:
    """What the head publishes in the place of a rendezvous: there is none.

    Attributes:
        reason: why, in words.
    """

    reason: str


@dataclass(frozen=True)
class Failure:
    """Why a node has left an attempt.

    Attributes:
        node, host: which one.
        reason: in words.
        leaves: whether it takes no part in another attempt either.
        is_lost: whether it did not say so itself, but another node that has missed it.
    """

    node: int
    host: str
    reason: str
    leaves: bool = False
    is_lost: bool = False

    def __str__(self) -> str:
        return f"node {self.node} ({self.host}) failed: {self.reason}"


class Meeting:
    """The files by which the nodes of one start of a run find each other.

    The start's key is in their names: what an earlier start has left is never read. So is the
    number of the round; there is one per attempt.
    """

    def __init__(self, run: RunDir, node: Node) -> None:
        self.run = run
        self.node = node
        self.round = 0
        self._place = run.job / "rendezvous"
        self._place.mkdir(parents=True, exist_ok=True)

    @property
    def key(self) -> str:
        """Names this round, equal on all nodes and no other round's."""
        return f"{self.node.key}.{self.round}" if self.round else self.node.key

    def publish(self, ranks: int) -> tuple[Rendezvous, socket.socket]:
        """As the head: take an attempt number and a port, and tell the other nodes.

        Returns:
            The rendezvous, and the socket that holds its port until the agent listens there.

        Raises:
            HostError: another host is not found or reached.
            RendezvousError: no port is free.
        """
        address = route(self.node, None).address
        holder = _reserve(address, hosts.port(self.key))
        port = holder.getsockname()[1]
        attempt = _next_attempt(self.run)
        rendezvous = Rendezvous(attempt, self.node.host, address, port, ranks)
        write_atomic(self._published, json.dumps(asdict(rendezvous)) + "\n")
        return rendezvous, holder

    def publish_end(self, reason: str) -> None:
        """As the head: tell the other nodes that there is no other round."""
        write_atomic(self._end, reason)

    def read(self, ranks: int) -> Rendezvous | Over | None:
        """As another node: what the head has published, None while it has not.

        Raises:
            RendezvousError: the head runs another number of ranks.
        """
        try:
            found = Rendezvous(**json.loads(self._published.read_text()))
        except FileNotFoundError:
            return Over(self._end.read_text()) if self._end.exists() else None
        if found.ranks_per_node != ranks:
            raise RendezvousError(
                f"this node would run {ranks} ranks, but node 0 ({found.host}) runs "
                f"{found.ranks_per_node}: give all nodes the same number of GPUs, or set "
                "--nproc-per-node"
            )
        return found

    def silence(self) -> RendezvousError:
        """The error of a node that has waited for the head in vain."""
        return RendezvousError(
            f"node 0 ({self.node.hosts[0]}) has not published {self._published} within "
            f"{DEADLINE:.0f} s: see its output, and whether {self.node.host} shares the file "
            "system of the run directory with it"
        )

    def fail(self, reason: str, leaves: bool = False) -> None:
        """Tell the other nodes that this one has failed; the first to fail is the one they hear."""
        self._tell(Failure(self.node.number, self.node.host, reason, leaves))

    def miss(self, number: int) -> None:
        """Tell the other nodes that one of them is silent."""
        reason = "its supervisor is silent"
        self._tell(Failure(number, self.node.hosts[number], reason, leaves=True, is_lost=True))

    def failure(self) -> Failure | None:
        """Which node has failed in this round; None if none has."""
        try:
            return Failure(**json.loads(self._failed.read_text()))
        except FileNotFoundError:
            return None

    @property
    def _published(self) -> Path:
        return self._place / f"{self.key}.json"

    @property
    def _end(self) -> Path:
        return self._place / f"{self.key}.end"

    @property
    def _failed(self) -> Path:
        return self._place / f"{self.key}.failed.json"

    def _tell(self, failure: Failure) -> None:
        beside = self._failed.with_name(f".{self._failed.name}.{self.node.number}")
        write_atomic(beside, json.dumps(asdict(failure)) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(beside, self._failed)  # unlike a rename, a link never replaces
        beside.unlink()


def lost_hosts(run: RunDir, start: str) -> dict[str, str]:
    """Which host was missed in a round, by the names of the rounds in which one was.

    Args:
        run: the run.
        start: of its job.
    """
    found = {}
    for path in (run.job / "rendezvous").glob(f"{start}.*.failed.json"):
        failure = Failure(**json.loads(path.read_text()))
        if failure.is_lost:
            found[path.name] = failure.host
    return found


def attempt_directory(run: RunDir, attempt: int) -> Path:
    """Where the nodes of an attempt write how they fare."""
    return run.job / f"attempt-{attempt}"


def _next_attempt(run: RunDir) -> int:
    attempt = 0
    while True:
        try:
            attempt_directory(run, attempt).mkdir(parents=True)
            return attempt
        except FileExistsError:
            attempt += 1


def _reserve(address: str, first: int) -> socket.socket:
    """A socket on the first free port from `first` on, where the agent's store is to listen."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for offset in range(hosts.PORTS):
        port = hosts.FIRST_PORT + (first - hosts.FIRST_PORT + offset) % hosts.PORTS
        holder = socket.socket(family, socket.SOCK_STREAM)
        try:
            holder.bind((address, port))
            return holder
        except OSError:
            holder.close()
    raise RendezvousError(
        f"no port from {hosts.FIRST_PORT} to {hosts.FIRST_PORT + hosts.PORTS - 1} is free on "
        f"{address} of {socket.gethostname()}"
    )
