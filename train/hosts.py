"""How do hosts reach each other? Node lists, routes and ports. No torch.

A host's own name says nothing: Debian maps it to 127.0.1.1 in /etc/hosts, and torch then looks for
the head node on the wrong side of the loopback. So a host asks the kernel by which address and
interface it reaches the *others*.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

FIRST_PORT, PORTS = 20000, 10000
"""Ports of a rendezvous: below the range from which Linux takes ports of its own (32768 on)."""


class HostError(Exception):
    """A host cannot be found or reached; the message names it and says what to do."""


@dataclass(frozen=True)
class Route:
    """The way from this host to another: own address and the network interface that has it."""

    address: str
    interface: str


def expand(nodelist: str) -> list[str]:
    """The host names in a node list as Slurm writes it.

    `rack[1-2]node[03-04,7],login` has seven names: several brackets multiply, leading zeros stay.

    Raises:
        ValueError: the expression is not a node list.
    """
    names: list[str] = []
    for part in _split(nodelist):
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        if any(bracket in piece for piece in pieces[::2] for bracket in "[]"):
            raise ValueError(f"'{nodelist}' is not a node list: a bracket has no partner")
        choices = [
            list(_numbers(piece, nodelist)) if index % 2 else [piece]
            for index, piece in enumerate(pieces)
        ]
        names.extend("".join(choice) for choice in itertools.product(*choices))
    return names


def route(peer: str) -> Route:
    """How this host reaches another one.

    Args:
        peer: name or address of another host; never this host's own.

    Raises:
        HostError: the name does not resolve, resolves to loopback, or no route leads there.
    """
    address = _resolve(peer)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # UDP: the kernel picks a route, nothing is sent
        except OSError as error:
            raise HostError(
                f"no route from {socket.gethostname()} to {peer} ({address}): {error.strerror}"
            ) from None
        own = probe.getsockname()[0]
    return Route(own, _interface(own))


def port(key: str) -> int:
    """A port from 20000 to 29999 that depends on `key` alone, so that jobs seldom meet in one."""
    return FIRST_PORT + zlib.crc32(key.encode()) % PORTS


def _split(nodelist: str) -> Iterator[str]:
    """The parts between commas that stand outside of brackets."""
    part, depth = "", 0
    for char in nodelist:
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            if part:
                yield part
            part = ""
        else:
            part += char
    if part:
        yield part


def _numbers(ranges: str, nodelist: str) -> Iterator[str]:
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None:
            raise ValueError(f"'{nodelist}' is not a node list: '{item}' is no number or range")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ValueError(f"'{nodelist}' is not a node list: '{item}' runs backwards")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _resolve(peer: str) -> str:
    try:
        found = socket.getaddrinfo(peer, None, type=socket.SOCK_DGRAM)
    except socket.gaierror as error:
        raise HostError(
            f"{socket.gethostname()} cannot resolve the host name '{peer}' ({error.strerror}): "
            f"it must stand in DNS or in /etc/hosts of every node"
        ) from None
    addresses = sorted((str(entry[4][0]) for entry in found), key=lambda text: ":" in text)
    import ipaddress

    for address in addresses:
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return address
    raise HostError(
        f"on {socket.gethostname()} the host name '{peer}' resolves to the loopback address "
        f"{addresses[0]}, where no other host is reached: correct /etc/hosts or DNS"
    )


def _interface(address: str) -> str:
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return str(name)
    raise HostError(f"no interface of {socket.gethostname()} has the address {address}")


def usable_cpus() -> int:
    """CPUs on which this process may run: what Slurm or taskset has left of the machine."""
    return len(os.sched_getaffinity(0))
