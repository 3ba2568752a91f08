"""InfiniBand, RoCE, EFA and Slingshot, and how NCCL would use them."""

import re
from typing import NamedTuple

import psutil

from rollcall.launch.doctor import check
from rollcall.launch.doctor.check import LocalNode, Result, Skip, State, judge, warn
from rollcall.launch.doctor.links import interface
from rollcall.messages.text import listed
from rollcall.system import fabric

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


def hca_ports(node: LocalNode) -> Result:
    ports = _ports(node)
    active = [port.name for port in ports if port.state == "ACTIVE"]
    waiting = [f"{port.name} is {port.state}" for port in ports if port.state in ("INIT", "ARMED")]
    down = [f"{port.name} is {port.state}" for port in ports if port.state == "DOWN"]
    text = f"{len(active)} of {len(ports)} ports are active"
    if waiting or not active:
        return Result("bad", f"{text}: {listed(waiting + down, 4)}", ",".join(active))
    return warn(down and f"{text}: {listed(down, 4)}", text, ",".join(active))


def hca_rate(node: LocalNode) -> Result:
    rates = {port.name: port.rate for port in _ports(node) if port.state == "ACTIVE"}
    fastest = max(map(check.number, rates.values()), default=0)
    slow = [f"{name}: {rate}" for name, rate in rates.items() if check.number(rate) < fastest]
    text = f"{fastest:.0f} Gbit/s"
    return warn(slow and f"slower than {text}: {listed(slow, 3)}", text, rates)


def roce(node: LocalNode) -> Result:
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


def nccl_plugin(node: LocalNode) -> Result:
    name = fabric.recognise(check.SYSROOT)
    if name not in PLUGIN:
        raise Skip("no EFA and no Slingshot")
    known = node.run("ldconfig", "-p")
    folders = filter(None, node.env.get("LD_LIBRARY_PATH", "").split(":"))
    files = [path for folder in folders for path in node.paths(f"{folder}/libnccl-net*.so*")]
    plugins = files or re.findall(r"libnccl-net\S*", known)
    return judge(not plugins and f"no libnccl-net*.so for {name}", plugins[0] if plugins else "")


def nccl_interface(node: LocalNode) -> Result:
    given = node.env.get("NCCL_SOCKET_IFNAME") or _of_files(node).get("NCCL_SOCKET_IFNAME")
    if given:
        names = given.lstrip("=^").split(",")
        existing = [*psutil.net_if_addrs()]
        absent = [name for name in names if not any(nic.startswith(name) for nic in existing)]
        problem = f"{listed(absent)} does not exist; it has {listed(existing)}"
        missing = absent == names and not given.startswith("^")  # one of them is enough
        return judge(missing and problem, f"{given}, set by NCCL_SOCKET_IFNAME", given)
    name = str(interface(node).value)
    return Result("ok", f"{name}, which rollcall sets because it leads to the other hosts", name)


def nccl_hca(node: LocalNode) -> Result:
    ports = [port for port in _ports(node) if port.state == "ACTIVE"]
    given = node.env.get("NCCL_IB_HCA") or _of_files(node).get("NCCL_IB_HCA", "")
    if given and not given.startswith("^"):
        names = given.lstrip("=").split(",")
        absent = [name for name in names if not any(port.name.startswith(name) for port in ports)]
        text = f"{given}, set by NCCL_IB_HCA"
        state: State = "bad" if absent == names else "warning"
        problem = absent and f"{listed(absent)} of NCCL_IB_HCA is not active"
        return judge(problem, text, given, state)
    if node.env.get("NCCL_IB_DISABLE") == "1":
        return Result("warning", f"none of {len(ports)}, because NCCL_IB_DISABLE is 1", "none")
    names = [port.name for port in ports]
    return Result("ok", f"{listed(names, 8)}: all active ports", ",".join(names))


def nccl_variables(node: LocalNode) -> Result:
    slow = [f"{name}={value}" for name, value in SLOW.items() if node.env.get(name) == value]
    names = ("NCCL_", "TORCH_NCCL_", "GLOO_", "FI_", "UCX_", "OMPI_MCA_")
    values = {name: text for name, text in node.env.items() if name.startswith(names)}
    values = _of_files(node) | values
    added = fabric.settings(node.env, check.SYSROOT)
    text = f"{len(values)} variables are set"
    if added:
        pairs = listed([f"{name}={value}" for name, value in added.items()], 8)
        text += f"; rollcall sets {pairs} for {fabric.recognise(check.SYSROOT)}"
    return warn(", ".join(slow), text, added | values)


def _ports(node: LocalNode) -> list[Port]:
    """Return the ports that the kernel lists; ibstat reads the same files."""
    ports = []
    for path in node.paths(f"{DEVICES}/*/ports/*"):
        device, number = path.split("/")[4], path.rpartition("/")[2]
        state = node.read(f"{path}/state").partition(":")[2].strip()
        rate, layer = node.read(f"{path}/rate"), node.read(f"{path}/link_layer")
        ports.append(Port(f"{device}:{number}", state, rate, layer))
    if not ports:
        raise Skip("this machine has no host channel adapter")
    return ports


def _of_files(node: LocalNode) -> dict[str, str]:
    return fabric.configured(node.env, check.SYSROOT)
