"""Host names and network interfaces."""

import ipaddress
import os
import socket
import time
from typing import Any

import psutil

from rollcall.launch.doctor.check import THOROUGH, LocalNode, Result, Skip, judge, warn
from rollcall.messages.text import listed
from rollcall.system import hosts

ALL_REDUCE = """
import datetime, os, sys, time
import torch
from torch import distributed
store, os.environ["GLOO_SOCKET_IFNAME"], rank, count = sys.argv[1:]
place = dict(init_method=f"file://{store}", rank=int(rank), world_size=int(count))
distributed.init_process_group("gloo", **place, timeout=datetime.timedelta(seconds=30))
begin, ones = time.perf_counter(), torch.ones(2**18)
distributed.all_reduce(ones)
took = time.perf_counter() - begin
print(took if (ones == int(count)).all() else sys.exit("wrong sums"), flush=True)
os._exit(0)  # a thread of gloo may abort while the interpreter shuts down
"""


def own_name(node: LocalNode) -> Result:
    name, begin = socket.gethostname(), time.monotonic()
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except socket.gaierror as error:
        return Result("warning", f"{name} does not resolve: {error.strerror}", "unknown")
    took = time.monotonic() - begin
    loops = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    text = f"its name resolves to {address}" + (f", which takes {took:.1f} s" if took > 2 else "")
    problem = (loops and len(node.hosts) > 1) or took > 2
    return warn(problem and text, text, "loopback" if loops else "routable")


def interface(node: LocalNode) -> Result:
    name, given = _to_others(node), node.env.get("GLOO_SOCKET_IFNAME", "")
    existing = [*psutil.net_if_addrs()]
    absent = given and not {*given.split(",")} & {*existing}
    problem = absent and f"GLOO_SOCKET_IFNAME={given} does not exist; it has {listed(existing)}"
    return judge(problem, name, name)


def _to_others(node: LocalNode) -> str:
    """Return the interface to the other hosts, or to the outside; Skip without one."""
    this = socket.gethostname().partition(".")[0]
    peers = [name for name in node.hosts if name.partition(".")[0] != this]
    try:
        name = hosts.route(peers[0]).interface
    except (IndexError, hosts.HostError):
        routes = (line.split() for line in node.read("/proc/net/route").splitlines())
        name = next((words[0] for words in routes if words[1:2] == ["00000000"]), "")
    if not name:
        raise Skip("no other host, and no default route")
    return name


def all_reduce(node: LocalNode) -> Result:
    this, count = node.env.get("SLURMD_NODENAME", os.uname().nodename), len(node.hosts)
    if node.meeting is None or this not in node.hosts or count == 1:
        raise Skip("only the nodes of one job can be compared")
    words = (str(node.meeting / "store"), _to_others(node), str(node.hosts.index(this)), str(count))
    took = float(node.run(node.python, "-c", ALL_REDUCE, *words, seconds=THOROUGH))
    return Result("ok", f"1 MB over all {count} hosts with gloo took {1000 * took:.0f} ms")


def mtu(node: LocalNode) -> Result:
    name, link = _link(node)
    return Result("ok", f"{link.mtu} bytes on {name}", str(link.mtu))


def link_speed(node: LocalNode) -> Result:
    name, link = _link(node)
    if not link.speed:
        raise Skip(f"{name} does not report its speed")
    is_half = link.duplex == psutil.NIC_DUPLEX_HALF
    text = f"{name}: {link.speed} Mbit/s{', half duplex' if is_half else ''}"
    return warn((link.speed < 1000 or is_half) and text, text, str(link.speed))


def _link(node: LocalNode) -> tuple[str, Any]:
    # psutil asks the kernel: /sys may show the interfaces of another network namespace.
    name = str(interface(node).value)
    return name, psutil.net_if_stats()[name]
