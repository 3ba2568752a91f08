"""Node lists, routes between hosts, and ports. No torch.

A host's own name does not help: Debian maps it to 127.0.1.1, so torch would listen on the loopback.
Instead, a host asks the kernel by which address and interface it reaches the others.
"""

import contextlib
import itertools
import os
import random
import re
import socket
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FIRST_PORT, PORTS = 20000, 10000
"""Ports of a rendezvous. Linux assigns the ports from 32768 on to outgoing connections."""


class HostError(Exception):
    """A host cannot be resolved or reached; the message names it and says what to do."""


@dataclass(frozen=True)
class Route:
    """The local address and network interface through which this host reaches another one."""

    address: str
    interface: str


def expand(nodelist: str) -> list[str]:
    """Return the host names in a node list of Slurm; raise ValueError if it is none.

    `rack[1-2]node[03-04,7],login` has seven names: brackets multiply, and leading zeros stay.
    """
    names: list[str] = []
    for part in filter(None, re.split(r",(?![^\[]*\])", nodelist)):  # commas outside of brackets
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        if any(bracket in piece for piece in pieces[::2] for bracket in "[]"):
            raise ValueError(f"'{nodelist}' is not a node list: unbalanced brackets")
        choices = [[piece] for piece in pieces]
        choices[1::2] = [list(_numbers(piece, nodelist)) for piece in pieces[1::2]]
        names.extend("".join(choice) for choice in itertools.product(*choices))
    return names


def fold(names: Iterable[str]) -> str:
    """Return a node list as Slurm writes it, sorted and each name once: `n[1-3,7],login`."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name in sorted({*names}):
        stem = re.sub(r"[0-9]{1,9}\Z", "", name)
        groups.setdefault((stem, len(name) - len(stem)), []).append(name[len(stem) :])
    parts = []
    for (stem, _), numbers in groups.items():
        pairs = itertools.groupby(enumerate(numbers), lambda pair: int(pair[1] or 0) - pair[0])
        ranges = [[number for _, number in run] for _, run in pairs]
        texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else run[0] for run in ranges]
        parts.append(f"{stem}[{','.join(texts)}]" if len(numbers) > 1 else stem + numbers[0])
    return ",".join(parts)


def of_job(env: Mapping[str, str]) -> list[str]:
    """Return this Slurm job's hosts, group by group; KeyError or ValueError for a bad variable."""
    groups = range(int(env.get("SLURM_HET_SIZE", 0)))
    names = [f"SLURM_JOB_NODELIST_HET_GROUP_{group}" for group in groups]
    return [host for name in names or ["SLURM_JOB_NODELIST"] for host in expand(env[name])]


def of_step(env: Mapping[str, str]) -> list[str]:
    """Return the hosts of this Slurm step in the order of their numbers; raise as `of_job`."""
    names = expand(env["SLURM_STEP_NODELIST"])  # sorted, also if a group comes before another
    return sorted(names, key=of_job(env).index) if "SLURM_HET_SIZE" in env else names


def ranks_of_nodes(text: str, nodes: int) -> tuple[int, ...]:
    """Return the ranks of each node, from `4` or `1,2,2`; raise ValueError for another text."""
    counts = tuple(int(part) if part.isdecimal() else 0 for part in text.split(","))
    if 0 in counts:
        expected = f"expected a number of ranks such as 4, or of each node: 1,2,2; not {text}"
        raise ValueError(f"{expected}. Without it, there is one rank per GPU")
    if len(counts) not in (1, nodes):
        raise ValueError(f"{text} has numbers for {len(counts)} nodes, and the run has {nodes}")
    return counts if len(counts) == nodes else counts * nodes


def route(peer: str) -> Route:
    """Return the route to another host, given by name or address; raise HostError without one."""
    address = _resolve(peer)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # UDP: the kernel picks a route, nothing is sent
        except OSError as error:
            way = f"from {socket.gethostname()} to {peer} ({address})"
            raise HostError(f"no route {way}: {error.strerror}") from None
        local = probe.getsockname()[0]
    return Route(local, _interface(local))


def port(key: str) -> int:
    """Return a port from 20000 to 29999 that depends only on `key`, so that jobs rarely collide."""
    return FIRST_PORT + zlib.crc32(key.encode()) % PORTS


def _numbers(ranges: str, nodelist: str) -> Iterator[str]:
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None:
            raise ValueError(f"'{nodelist}' is not a node list: '{item}' is not a number or range")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ValueError(f"'{nodelist}' is not a node list: the range '{item}' is reversed")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _resolve(peer: str) -> str:
    try:
        entries = socket.getaddrinfo(peer, None, type=socket.SOCK_DGRAM)
    except socket.gaierror as error:
        raise HostError(
            f"{socket.gethostname()} cannot resolve the host name '{peer}' ({error.strerror}): "
            "add it to DNS, or to /etc/hosts of every node"
        ) from None
    addresses = sorted((str(entry[4][0]) for entry in entries), key=lambda text: ":" in text)
    import ipaddress

    for address in addresses:
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return address
    raise HostError(
        f"on {socket.gethostname()} the host name '{peer}' resolves to the loopback address "
        f"{addresses[0]}, which cannot reach another host; correct /etc/hosts or DNS"
    )


def _interface(address: str) -> str:
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return str(name)
    raise HostError(f"no network interface of {socket.gethostname()} has the address {address}")


def processor() -> str:
    """Return the name of this machine's CPU."""
    match = re.search(r"^model name\s*:(.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1].strip() if match else os.uname().machine


def usable_cpus() -> int:
    """Return the number of CPUs on which this process may run, as Slurm or taskset allow."""
    return len(os.sched_getaffinity(0))


def free_port() -> int:
    """Return a free TCP port, which the kernel gives to no other program before it is used."""
    while True:
        port = random.SystemRandom().randrange(FIRST_PORT, FIRST_PORT + PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
