"""The rendezvous of an attempt's nodes, which the head publishes in the run directory.

This needs no host name, which might resolve to the host itself, compares no clocks, and takes no
message from the network: only the run's owner can write these files.
"""

import socket
from collections.abc import Sequence

from rollcall.launch.node.identity import Node
from rollcall.records.attempt import GaveUp, NodeFailure, NoMoreRounds, Rendezvous, new_attempt
from rollcall.records.run_dir import RunDir
from rollcall.system import hosts
from rollcall.system.files import is_there
from rollcall.system.timer import Every

DEADLINE = 300.0
"""Seconds that a node waits for the head to publish where to meet."""

END_LOOK = 1.0
"""Seconds between two looks at whether the head has published that no further round follows."""


class RendezvousError(Exception):
    """The nodes cannot meet; the message names the node or host and what to do."""


def route(node: Node, address: str | None) -> hosts.Route:
    """Return the route from this node to the others, or the head; raise HostError if it cannot."""
    if node.peer is None:
        return hosts.Route("127.0.0.1", "lo")
    return hosts.route(address or node.peer)


class Meeting:
    """The files, named by start and round, by which the nodes of a run find each other."""

    def __init__(self, run: RunDir, node: Node) -> None:
        self.run = run
        self.node = node
        self.round = 0
        self._address = ""  # of the head, once it is known
        self._first_port = hosts.port(node.key)  # where the first round looks for a free one
        self._look_for_end = Every(END_LOOK)
        folder = Rendezvous.path_in(run.path, key=self.key).parent
        if not is_there(folder):  # thousands of nodes would ask for one folder
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def key(self) -> str:
        """Identifies this round; the same on all nodes."""
        return f"{self.node.key}.{self.round}" if self.round else self.node.key

    def publish(self, ranks: Sequence[int]) -> tuple[Rendezvous, socket.socket]:
        """As the head: publish an attempt number and a port, held by the socket until it is used.

        Raises:
            HostError, RendezvousError: another host is not reached, or no port is free.
        """
        self._address = self._address or route(self.node, None).address
        holder = _reserve(self._address, self._first_port + self.round)
        port = holder.getsockname()[1]
        attempt = new_attempt(self.run.path, self.run.next_attempt())
        rendezvous = Rendezvous(attempt, self.node.host, self._address, port, ranks[0])
        rendezvous.write(self.run.path, key=self.key)
        return rendezvous, holder

    def read(self, ranks: Sequence[int]) -> Rendezvous | NoMoreRounds | None:
        """As another node: return the head's message, or None; raise if its ranks are others."""
        rendezvous = Rendezvous.read(self.run.path, key=self.key)
        if rendezvous is None:
            is_due = self._look_for_end.is_due()
            return NoMoreRounds.read(self.run.path, key=self.key) if is_due else None
        if rendezvous.ranks_per_node != ranks[0]:
            raise RendezvousError(
                f"this node would run {ranks[self.node.number]} ranks, but node 0 "
                f"({rendezvous.host}) runs {rendezvous.ranks_per_node}: give all nodes the same "
                "number of GPUs, or set --nproc-per-node, for each node if they differ: 4,8,8"
            )
        return rendezvous

    def silence(self) -> RendezvousError:
        """Return the error of a node that has waited for the head in vain."""
        return RendezvousError(
            f"node 0 ({self.node.hosts[0]}) has not published "
            f"{Rendezvous.path_in(self.run.path, key=self.key)} in time: look at its output, and "
            f"check that {self.node.host} shares the file system of the run directory with it"
        )

    def fail(self, reason: str, leaves: bool = False) -> None:
        """Tell the other nodes that this one has failed, unless another one was first."""
        failure = NodeFailure(self.node.number, self.node.host, reason, leaves)
        failure.write_once(self.run.path, key=self.key)

    def give_up(self, reason: str) -> None:
        """Tell the other nodes why this one gives up, and write it down even if others failed."""
        self.fail(reason, leaves=True)
        GaveUp(self.node.number, self.node.host, reason).write(self.run.path, key=self.key)

    def report_lost(self, number: int) -> None:
        """Tell the other nodes that one of them is silent; it can refute that."""
        host, reason = self.node.hosts[number], "its supervisor is silent"
        failure = NodeFailure(number, host, reason, leaves=True, is_lost=True)
        failure.write_once(self.run.path, key=self.key)

    def refute(self) -> None:
        """Take back the report that this node is lost."""
        NodeFailure.path_in(self.run.path, key=self.key).unlink(missing_ok=True)

    def failure(self) -> NodeFailure | None:
        """Return the failure of a node in this round; None if there is none."""
        return NodeFailure.read(self.run.path, key=self.key)


def _reserve(address: str, first: int) -> socket.socket:
    """Bind a socket to the first free port from `first` on, where the ranks' store will listen."""
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
