"""InfiniBand, RoCE, EFA and Slingshot, and what NCCL would make of them."""

import re
from typing import NamedTuple

import psutil

from rollcall import fabric
from rollcall.launch.doctor import check
from rollcall.launch.doctor.check import Found, Node, Skip, State, judge, ok, warn
from rollcall.launch.doctor.links import interface
from rollcall.text import listed

DEVICES = "/sys/class/infiniband"
SLOW = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
SLOW |= {"NCCL_DEBUG": "TRACE", "CUDA_LAUNCH_BLOCKING": "1", "NCCL_NET_GDR_LEVEL": "0"}
SLOW |= {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
PLUGIN = ("slingshot", "efa")
"""Fabrics that NCCL reaches only by a plug-in."""


class Port(NamedTuple):
    """A port of a host channel adapter."""

    name: str  # mlx5_0:1
    state: str  # ACTIVE, DOWN, INIT
    rate: str  # 400 Gb/sec (4X NDR)
    layer: str  # InfiniBand or Ethernet


def hca_ports(node: Node) -> Found:
    ports = _ports(node)
    active = [port.name for port in ports if port.state == "ACTIVE"]
    waiting = [f"{port.name} is {port.state}" for port in ports if port.state in ("INIT", "ARMED")]
    down = [f"{port.name} is {port.state}" for port in ports if port.state == "DOWN"]
    text = f"{len(active)} of {len(ports)} ports are active"
    if waiting or not active:
        return Found("bad", f"{text}: {listed(waiting + down, 4)}", ",".join(active))
    return warn(down and f"{text}: {listed(down, 4)}", text, ",".join(active))


def hca_rate(node: Node) -> Found:
    rates = {port.name: port.rate for port in _ports(node) if port.state == "ACTIVE"}
    fastest = max(map(_gigabits, rates.values()), default=0)
    slow = [f"{name}: {rate}" for name, rate in rates.items() if _gigabits(rate) < fastest]
    text = f"{fastest:.0f} Gbit/s"
    return warn(slow and f"slower than {text}: {listed(slow, 3)}", text, rates)


def hca_errors(node: Node) -> Found:
    _ports(node)
    wrong = []
    for kind in ("link_downed", "symbol_error", "local_link_integrity_errors", "port_rcv_errors"):
        for path in node.paths(f"{DEVICES}/*/ports/*/counters/{kind}"):
            if (count := node.read(path)) not in ("", "0"):
                wrong.append(f"{path.split('/')[4]}: {count} {kind}")
    return warn(listed(wrong, 3), "no errors are counted")


def roce(node: Node) -> Found:
    ports = [port for port in _ports(node) if port.layer == "Ethernet" and port.state == "ACTIVE"]
    if not ports or fabric.recognise(check.SYSROOT) in PLUGIN:
        raise Skip("no port uses RoCE")
    without = []
    for port in ports:
        device, _, number = port.name.partition(":")
        types = node.paths(f"{DEVICES}/{device}/ports/{number}/gid_attrs/types/*")
        if not any("v2" in node.read(path) for path in types):
            without.append(port.name)
    return judge(without and f"no RoCE v2 address: {listed(without, 3)}", f"{len(ports)} ports")


def nccl_plugin(node: Node) -> Found:
    name = fabric.recognise(check.SYSROOT)
    if name not in PLUGIN:
        raise Skip("no EFA and no Slingshot")
    known = node.run("ldconfig", "-p")
    folders = filter(None, node.env.get("LD_LIBRARY_PATH", "").split(":"))
    there = [path for folder in folders for path in node.paths(f"{folder}/libnccl-net*.so*")]
    found = there or re.findall(r"libnccl-net\S*", known)
    return judge(not found and f"no libnccl-net*.so for {name}", found[0] if found else "")


def nccl_interface(node: Node) -> Found:
    given = node.env.get("NCCL_SOCKET_IFNAME") or _of_files(node).get("NCCL_SOCKET_IFNAME")
    if given:
        names = given.lstrip("=^").split(",")
        there = [*psutil.net_if_addrs()]
        absent = [name for name in names if not any(it.startswith(name) for it in there)]
        problem = f"{listed(absent)} does not exist; it has {listed(there)}"
        missing = absent == names and not given.startswith("^")  # one of them is enough
        return judge(missing and problem, f"{given}, because NCCL_SOCKET_IFNAME says so", given)
    name = str(interface(node).value)
    return ok(f"{name}, which rollcall sets because it leads to the other hosts", name)


def nccl_hca(node: Node) -> Found:
    ports = [port for port in _ports(node) if port.state == "ACTIVE"]
    given = node.env.get("NCCL_IB_HCA") or _of_files(node).get("NCCL_IB_HCA", "")
    if given and not given.startswith("^"):
        names = given.lstrip("=").split(",")
        absent = [name for name in names if not any(it.name.startswith(name) for it in ports)]
        text = f"{given}, because NCCL_IB_HCA says so"
        state: State = "bad" if absent == names else "warning"
        problem = absent and f"{listed(absent)} of NCCL_IB_HCA is not active"
        return judge(problem, text, given, state)
    if node.env.get("NCCL_IB_DISABLE") == "1":
        return Found("warning", f"none of {len(ports)}, because NCCL_IB_DISABLE is 1", "none")
    names = [port.name for port in ports]
    return ok(f"{listed(names, 8)}: all active ports", ",".join(names))


def nccl_variables(node: Node) -> Found:
    slow = [f"{name}={value}" for name, value in SLOW.items() if node.env.get(name) == value]
    names = ("NCCL_", "TORCH_NCCL_", "GLOO_", "FI_", "UCX_", "OMPI_MCA_")
    values = _of_files(node) | {it: text for it, text in node.env.items() if it.startswith(names)}
    added = fabric.settings(node.env, check.SYSROOT)
    text = f"{len(values)} variables are set"
    if added:
        pairs = listed([f"{name}={value}" for name, value in added.items()], 8)
        text += f"; rollcall sets {pairs} for {fabric.recognise(check.SYSROOT)}"
    return warn(", ".join(slow), text, added | values)


def _ports(node: Node) -> list[Port]:
    """Return the ports that the kernel lists; ibstat reads the same files."""
    found = []
    for path in node.paths(f"{DEVICES}/*/ports/*"):
        device, number = path.split("/")[4], path.rpartition("/")[2]
        state = node.read(f"{path}/state").partition(":")[2].strip()
        rate, layer = node.read(f"{path}/rate"), node.read(f"{path}/link_layer")
        found.append(Port(f"{device}:{number}", state, rate, layer))
    if not found:
        raise Skip("this machine has no host channel adapter")
    return found


def _of_files(node: Node) -> dict[str, str]:
    return fabric.configured(node.env, check.SYSROOT)


def _gigabits(rate: str) -> float:
    match = re.match(r"[\d.]+", rate)
    return float(match[0]) if match else 0.0
