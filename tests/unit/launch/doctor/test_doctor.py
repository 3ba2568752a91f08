"""Every check on a whole machine, on recorded outputs of GPU tools, and compared over nodes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from rollcall.cli.installation import ROOT
from rollcall.launch.commands import nodes as nodes_command
from rollcall.launch.doctor import (
    check,
    checkup,
    command,
    fabric,
    gpu,
    limits,
    links,
    peers,
)
from rollcall.launch.doctor.check import LocalNode, Result
from rollcall.launch.doctor.checkup import bad_nodes, checks, compare, examine
from rollcall.messages.refusal import RefusedError
from rollcall.records.nodes import KEPT, NodeReport
from rollcall.system import hosts
from rollcall.system.hosts import Route
from rollcall.system.process import stat

GPU = """<gpu id="00000000:{bus}:00.0"><product_name>NVIDIA H100 80GB HBM3</product_name>
<persistence_mode>{persistence}</persistence_mode><vbios_version>96.00.61.00.01</vbios_version>
<mig_mode><current_mig>{mig}</current_mig></mig_mode><compute_mode>{compute}</compute_mode>
<fabric><state>{fabric}</state><status>Success</status></fabric>
<pci><pci_gpu_link_info><link_widths><max_link_width>16x</max_link_width>
<current_link_width>{width}</current_link_width></link_widths></pci_gpu_link_info></pci>
<clocks_event_reasons><clocks_event_reason_hw_thermal_slowdown>{hot}
</clocks_event_reason_hw_thermal_slowdown></clocks_event_reasons>
<ecc_mode><current_ecc>{ecc}</current_ecc></ecc_mode>
<ecc_errors><volatile><sram_correctable>4</sram_correctable>
<dram_uncorrectable>{errors}</dram_uncorrectable></volatile></ecc_errors>
<remapped_rows><remapped_row_pending>{remap}</remapped_row_pending>
<remapped_row_failure>No</remapped_row_failure></remapped_rows>
<temperature><gpu_temp>{degrees} C</gpu_temp></temperature>
<gpu_power_readings><current_power_limit>{watts} W</current_power_limit>
<default_power_limit>700.00 W</default_power_limit></gpu_power_readings>
<applications_clocks><graphics_clock>{clock} MHz</graphics_clock></applications_clocks>
<default_applications_clocks><graphics_clock>1755 MHz</graphics_clock></default_applications_clocks>
<max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks>{processes}
<fb_memory_usage><total>81559 MiB</total><used>{used} MiB</used></fb_memory_usage></gpu>"""
FINE = {"persistence": "Enabled", "mig": "Disabled", "compute": "Default", "fabric": "Completed"}
FINE |= {"width": "16x", "hot": "Not Active", "ecc": "Enabled", "errors": "0", "remap": "No"}
FINE |= {"degrees": "41", "watts": "700.00", "clock": "1755", "used": "4", "driver": "570.86.15"}
FINE |= {"processes": ""}
USER = "<processes><process_info><pid>7</pid><type>{}</type></process_info></processes>"
NVLINK = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: {}\n"
KEY = "7-.doctor-x"
DMESG = "[  12.1] NVRM: loading\n[ 99.5] NVRM: Xid (PCI:0000:3b:00): {}, pid=71, name=python\n"


def install(folder: Path, name: str, text: str, code: int = 0) -> None:
    """Put a program on PATH that prints a recorded output."""
    (folder / f"{name}.txt").write_text(text)
    (folder / name).write_text(f"#!/bin/sh\ncat {folder}/{name}.txt\nexit {code}\n")
    (folder / name).chmod(0o755)


def gpus(**changes: str) -> str:
    """What `nvidia-smi -q -x` prints for two GPUs, of which the second has these values."""
    values = FINE | changes
    every = GPU.format(bus="18", **FINE) + GPU.format(bus="3B", **values)
    version = f"<driver_version>{values['driver']}</driver_version>"
    return f"<nvidia_smi_log>{version}{every}</nvidia_smi_log>"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on PATH, for recorded programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(check, "SYSROOT", str(tmp_path / "root"))
    return folder


def node(root: Path, env: Mapping[str, str] | None = None, *hosts: str) -> LocalNode:
    return LocalNode(root / "runs", sys.executable, hosts, {"HOME": str(root), **(env or {})})


def found(name: str, machine: LocalNode) -> Result:
    """The result of one check, as the doctor shows it."""
    return checkup._safely(checks()[name], machine)


def test_every_line_of_the_table_has_a_function_and_every_function_a_line() -> None:
    assert len(checks()) >= 45
    for each in checks().values():
        texts = (each.what, each.why, each.source)
        assert all((*texts, each.remedy)), each.name
    functions = {
        name
        for module in (limits, fabric, gpu, links)
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and name[0] != "_"
    } - {"Port"}
    assert functions <= {name.replace("-", "_") for name in checks()}


PLANTED = [
    ("persistence", {"persistence": "Disabled"}, "warning", "GPU 1: Disabled"),
    ("fabric-manager", {"fabric": "In Progress"}, "bad", "GPU 1: In Progress"),
    ("pcie", {"width": "8x"}, "warning", "GPU 1: 8x of 16x"),
    ("throttling", {"hot": "Active"}, "bad", "hw_thermal_slowdown"),
    ("ecc", {"ecc": "Disabled"}, "warning", "GPU 1: Disabled"),
    ("ecc-errors", {"errors": "3"}, "bad", "GPU 1: 3 uncorrectable"),
    ("remapped-rows", {"remap": "Yes"}, "bad", "remapped_row_pending"),
    ("power-limit", {"watts": "500.00"}, "warning", "GPU 1: 500.00 W of 700.00 W"),
    ("gpu-clocks", {"clock": "900"}, "warning", "GPU 1: 900 MHz of 1755 MHz"),
    ("gpu-memory", {"used": "40000"}, "bad", "GPU 1: 40000 MiB used by no process"),
    ("gpu-memory", {"processes": USER.format("C")}, "bad", "GPU 1: 4 MiB used by 7"),
]


@pytest.mark.parametrize(
    ("name", "changes", "state", "text"),
    PLANTED,
    ids=[f"{name}-{text}" for name, _, _, text in PLANTED],
)
def test_a_bad_gpu_is_named(
    name: str, changes: dict[str, str], state: str, text: str, tools: Path, tmp_path: Path
) -> None:
    recorded = gpus(**changes).replace("\n</clocks_event", "</clocks_event")
    install(tools, "nvidia-smi", recorded)
    seen = found(name, node(tmp_path))
    assert seen.state == state and text in seen.text, seen
    install(tools, "nvidia-smi", gpus())
    assert found(name, node(tmp_path)).state == "ok"


def test_what_other_tools_say_of_gpus(tools: Path, tmp_path: Path) -> None:
    install(tools, "nvidia-smi", gpus())
    assert found("driver", node(tmp_path)).value == "570.86.15"
    assert found("gpu-model", node(tmp_path)).text == "NVIDIA H100 80GB HBM3"
    assert found("gpu-count", node(tmp_path, {"SLURM_GPUS_ON_NODE": "2"})).state == "ok"
    lost = found("gpu-count", node(tmp_path, {"SLURM_GPUS_ON_NODE": "8"}))
    assert (lost.state, lost.text) == ("bad", "2, though the job has 8")
    for value, expected in (("26.562 GB/s", "ok"), ("<inactive>", "warning")):
        install(tools, "nvidia-smi", NVLINK.format(value))
        assert found("nvlink", node(tmp_path)).state == expected
    install(tools, "nvidia-smi", gpus())
    desktop = gpus(processes=USER.format("G"), used="4000")
    install(tools, "nvidia-smi", desktop)
    assert found("gpu-memory", node(tmp_path)).state == "ok", "a desktop's"
    for number, expected in (("79", "bad"), ("13", "warning"), ("94", "warning")):
        install(tools, "dmesg", DMESG.format(number))
        assert found("xid", node(tmp_path)).state == expected
    install(tools, "dmesg", "not permitted", 1)
    assert found("xid", node(tmp_path)).state == "not applicable"
    mismatch = "Failed to initialize NVML: Driver/library version mismatch"
    install(tools, "nvidia-smi", mismatch, 18)
    assert mismatch in found("driver", node(tmp_path)).text
    assert found("ecc", node(tmp_path)).state == "not applicable", "it is said once"


def test_a_driver_too_old_for_torch_is_named(tools: Path, tmp_path: Path) -> None:
    version = tmp_path / "root/proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15\n")
    install(tools, "nvidia-smi", "| Driver Version: 570.86.15     CUDA Version: 12.8     |")
    one = node(tmp_path)
    one.python = "torch-of-a-test"
    for built, expected in (("13.0", "bad"), ("12.8", "ok")):
        install(tools, one.python, json.dumps({"torch": "2.11.0", "cuda": built, "gpus": 2}))
        one._answers.clear()
        seen = found("cuda-build", one)
        assert seen.state == expected and f"torch's CUDA is {built}, the driver's 12" in seen.text
    install(tools, "nvidia-smi", "<nvidia_smi_log></nvidia_smi_log>")
    assert "lists no GPU" in found("gpu-model", node(tmp_path)).text


def port(root: Path, device: str, **files: str) -> Path:
    """Make a port of an adapter as the kernel shows it."""
    folder = root / "root/sys/class/infiniband" / device / "ports/1"
    (folder / "gid_attrs/types").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
    return folder


@pytest.mark.usefixtures("tools")
def test_what_ports_of_adapters_are(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_1", state="4: ACTIVE", rate="400 Gb/sec (4X NDR)")
    for state, rate, name, expected, text in (
        ("4: ACTIVE", "400", "hca-ports", "ok", "2 of 2 ports are active"),
        ("2: INIT", "400", "hca-ports", "bad", "mlx5_0:1 is INIT"),
        ("1: DOWN", "400", "hca-ports", "warning", "mlx5_0:1 is DOWN"),
        ("4: ACTIVE", "100", "hca-rate", "warning", "mlx5_0:1: 100 Gb/sec"),
        ("4: ACTIVE", "400", "hca-rate", "ok", "400 Gbit/s"),
    ):
        port(tmp_path, "mlx5_0", state=state, rate=f"{rate} Gb/sec")
        seen = found(name, node(tmp_path))
        assert seen.state == expected and text in seen.text, (name, seen)
    for names, expected in (("mlx5_7", "bad"), ("mlx5_0,mlx5_7", "warning")):
        seen = found("nccl-hca", node(tmp_path, {"NCCL_IB_HCA": names}))
        assert seen.state == expected and "mlx5_7" in seen.text
    off = found("nccl-hca", node(tmp_path, {"NCCL_IB_DISABLE": "1"}))
    assert off.state == "warning" and "NCCL_IB_DISABLE" in off.text


def test_what_the_kernel_says_of_adapters(tools: Path, tmp_path: Path) -> None:
    files = {"state": "4: ACTIVE", "rate": "100 Gb/sec (2X)", "link_layer": "Ethernet"}
    folder = port(tmp_path, "mlx5_0", **files)
    (folder / "gid_attrs/types/0").write_text("IB/RoCE v1\n")
    assert found("hca-ports", node(tmp_path)).value == "mlx5_0:1"
    assert found("roce", node(tmp_path)).state == "bad"
    (folder / "gid_attrs/types/1").write_text("RoCE v2\n")
    assert found("roce", node(tmp_path)).state == "ok"
    (tmp_path / "root/sys/class/infiniband/efa_0").mkdir()
    install(tools, "ldconfig", "libc.so.6 (libc6) => /lib/libc.so.6\n")
    assert found("nccl-plugin", node(tmp_path)).state == "bad"
    install(tools, "ldconfig", "libnccl-net.so (libc6) => /opt/amazon/lib/libnccl-net.so\n")
    assert found("nccl-plugin", node(tmp_path)).state == "ok"
    assert "FI_EFA_USE_HUGE_PAGE=0 for efa" in found("nccl-variables", node(tmp_path)).text


def test_variables_and_processes(tmp_path: Path) -> None:
    slow = found("nccl-variables", node(tmp_path, {"NCCL_P2P_DISABLE": "1"}))
    assert (slow.state, slow.text) == ("warning", "NCCL_P2P_DISABLE=1")
    few = found("cpus", node(tmp_path, {"SLURM_CPUS_PER_TASK": str((os.cpu_count() or 1) + 1)}))
    usable = len(os.sched_getaffinity(0))
    assert few.state == ("ok" if usable == os.cpu_count() else "bad")
    absent = found("nccl-interface", node(tmp_path, {"NCCL_SOCKET_IFNAME": "ib9"}))
    assert absent.state == "bad" and "ib9" in absent.text


def test_a_foreign_process_is_bad_on_nodes_that_the_job_has_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SAMPLE", 0.01)
    there = os.cpu_count() or 1
    for job, expected in ((f"{there}(x2)", "bad"), (f"{there},{there - 1}", "warning")):
        used = iter([{7: (0.0, "loop")}, {7: (1000.0, "loop")}])
        monkeypatch.setattr(limits, "_use", lambda _node, used=used: next(used))
        env = {"SLURM_JOB_CPUS_PER_NODE": job, "SLURM_CPUS_ON_NODE": "1"}
        assert found("foreign-processes", node(tmp_path, env)).state == expected


def test_many_small_foreign_processes_make_a_node_busy(tmp_path: Path) -> None:
    """Each of them gets a tenth of a CPU or less, as on a crowded node."""
    loop = "import time\nwhile True: time.sleep(0.02), sum(range(100_000))"
    start = (
        "import os, subprocess, sys; os.setsid(); words = [sys.executable, '-c', sys.argv[1]]\n"
        "for _ in range(20): print(subprocess.Popen(words, stdout=subprocess.DEVNULL).pid)"
    )
    started = subprocess.run(
        [sys.executable, "-c", start, loop],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=500,
    )
    try:
        result = found("foreign-processes", node(tmp_path))
        assert result.state == "warning" and "use" in result.text, result
    finally:
        for pid in map(int, started.stdout.split()):
            os.kill(pid, signal.SIGKILL)


def test_ended_processes_that_nobody_collects_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MANY", 0)
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.read() == b""
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert "are not collected" in found("zombies", node(tmp_path)).text
    child.wait()
    child.stdout.close()


def test_gloo_needs_an_interface_that_exists(tmp_path: Path) -> None:
    absent = found("interface", node(tmp_path, {"GLOO_SOCKET_IFNAME": "eth9"}))
    assert absent.state == "bad" and "eth9 does not exist; it has" in absent.text
    assert found("interface", node(tmp_path, {"GLOO_SOCKET_IFNAME": "lo,eth9"})).state == "ok"


HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


def met(names: Mapping[str, str]) -> dict[str, peers.Answers]:
    """Let hosts, here addresses of this machine, exchange data under these names."""
    answers: dict[str, peers.Answers] = {}

    def host(address: str) -> None:
        others = [other for other in HOSTS if other != address]
        answers[address] = peers.exchange(names[address], others, KEY, address)

    threads = [threading.Thread(target=host, args=[address]) for address in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_hosts_of_a_job_exchange_data() -> None:
    answers = met(dict(zip(HOSTS, HOSTS, strict=True)))
    for host, given in answers.items():
        names, failures, came = given
        assert came == {*names} == {*HOSTS} - {host} and not failures
        assert peers.judged(given) == ("ok", "1 MB to and from 2 other hosts", None, 0.0)


def test_a_host_that_others_do_not_reach_and_a_wrong_name_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "MEET", 0.5)
    answers = met({HOSTS[0]: HOSTS[0], HOSTS[1]: "n7"})
    state, text, *_ = peers.judged(answers[HOSTS[0]])
    assert (state, text) == ("bad", "the name 127.0.0.3 leads to n7")
    state, text, *_ = peers.judged(answers[HOSTS[1]])
    assert (state, text) == ("warning", "it does not reach 127.0.0.4: Connection refused")
    state, text, *_ = peers.judged(met({HOSTS[2]: HOSTS[2]})[HOSTS[2]])
    assert state == "bad" and text.endswith("; no other host reaches it")
    assert text.startswith("it reaches no other host: 127.0.0.2: Connection refused, 127.0.0.3: ")


def all_reduced(place: Path, hosts: list[str], count: int) -> list[Result]:
    """Let the first `count` hosts do the all-reduce of all; return their results."""
    results: list[Result] = []

    def work(host: str) -> None:
        env = {"SLURMD_NODENAME": host, "SLURM_JOB_ID": "7"}
        node = LocalNode(place, sys.executable, hosts, env)
        node.meeting = place
        results.append(checkup._safely(checks()["all-reduce"], node))

    threads = [threading.Thread(target=work, args=[host]) for host in hosts[:count]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.long
def test_all_hosts_of_a_job_add_up_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    way = Route("127.0.0.1", "lo")  # these hosts are one, to itself reachable only here
    monkeypatch.setattr(hosts, "route", lambda _: way)
    monkeypatch.setattr(links, "THOROUGH", 500.0)  # a busy machine takes long to import torch
    patient, impatient = (links.ALL_REDUCE.replace("=30", f"={number}") for number in (400, 1))
    monkeypatch.setattr(links, "ALL_REDUCE", patient)
    for result in all_reduced(tmp_path, ["n1", "n2", "n3"], count=3):
        assert result.state == "ok" and "1 MB over all 3 hosts" in result.text, result
    (tmp_path / "store").unlink(missing_ok=True)
    monkeypatch.setattr(links, "ALL_REDUCE", impatient)
    (result,) = all_reduced(tmp_path, ["n1", "n2"], count=1)
    assert result.state == "bad" and "python fails: " in result.text, "n2 does not come"


@pytest.mark.parametrize("count", [2, 3, 33, 1000])
def test_who_connects_to_whom_is_mutual(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    to = {name: peers.neighbours(names, name) for name in names}
    assert all(name in to[other] and other != name for name in names for other in to[name])
    assert {len(others) for others in to.values()} <= {*range(1, 33)}
    assert peers.neighbours(names, "login") == []


def test_people_read_units_and_no_remedy_for_a_check_that_was_late() -> None:
    sizes = {"a": 64e9, "b": 63e9, "c": 48e9}
    texts = {
        name: {"memory": Result("ok", f"{size / 1e9} GB", size, 3e9)}
        for name, size in sizes.items()
    }
    table = "\n".join(command.lines(texts, shows_all=False))
    assert "48.0 GB; others: 63.0 GB" in table, table
    late = {"a": {"mounts": Result("bad", f"{checkup.LATE} within 8 s: it hangs")}}
    shown = "\n".join(command.lines(late, shows_all=False))
    assert "did not finish" in shown and "Do this" not in shown


def test_what_is_usual_on_a_machine_is_no_alarm(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("127.0.1.1", 0))])
    assert found("own-name", node(tmp_path)).state == "ok", "as Debian installs it"
    assert found("own-name", node(tmp_path, {}, "n1", "n2")).state == "warning"
    either = {"NCCL_SOCKET_IFNAME": "lo,ib9"}
    assert found("nccl-interface", node(tmp_path, either)).state == "ok"
    (tools / "broken.py").symlink_to("nowhere")
    monkeypatch.chdir(tools)
    assert found("code", node(tmp_path)).state == "ok"


def test_a_check_that_crashes_or_hangs_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(machine: LocalNode) -> Result:
        machine.run("sleep", "60", seconds=60)
        raise AssertionError

    def crash(_node: LocalNode) -> Result:
        raise KeyError("x")

    line = next(iter(checks().values()))
    few = {"a": line._replace(name="a", run=hang), "b": line._replace(name="b", run=crash)}
    monkeypatch.setattr(checkup, "checks", lambda: few)
    monkeypatch.setattr(checkup, "QUICK", 0.2)
    machine = node(tmp_path)
    results = examine(machine, is_quick=True)
    assert [process.wait(10) for process in machine._started] == [-9], "none is left"
    assert results["a"].state == "bad" and "hangs" in results["a"].text
    assert results["b"].text == "the check failed: KeyError: 'x'"


def test_whoever_is_killed_while_nodes_are_checked_leaves_no_process(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from rollcall.launch.doctor import nodes; "
        "nodes.ask([['sh', '-c', 'echo $$ >pid; exec sleep 60']], Path('.'), 1, 60.0)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    asking = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=env)
    pid, end = tmp_path / "pid", time.monotonic() + 20
    while not (pid.exists() and pid.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    asking.kill()
    asking.wait()
    while stat(pid.read_text().strip()) and time.monotonic() < end:
        time.sleep(0.05)
    assert not stat(pid.read_text().strip())


def of(value: object, state: check.State = "ok", within: float = 0.0) -> Result:
    return Result(state, f"it is {value}", value, within)  # type: ignore[arg-type]


def test_the_odd_node_is_named_and_a_bad_one_is_avoided() -> None:
    three = {
        name: {"mtu": of("1500"), "packages": of({"torch": "2.1", "numpy": "2"})} for name in "abc"
    }
    odd = {"mtu": of("9000"), "packages": of({"torch": "2.0", "numpy": "2"})}
    differs = compare({**three, "d": odd})
    assert [tuple(it) for it in differs["mtu"]] == [("d", "9000", "1500")]
    assert [tuple(it) for it in differs["packages"]] == [("d", "torch 2.0", "2.1")]
    assert [*bad_nodes({**three, "d": odd})] == ["d"]
    # What a busy machine can cause is not held against a node in later jobs.
    slow = {"shared-memory": Result("bad", f"{checkup.LATE} within 8 s"), "python": of("", "bad")}
    slow |= {"connections": of("reached by none", "bad"), "all-reduce": of("late", "bad")}
    late = {**three, "d": three["a"] | slow}
    assert [*bad_nodes(late)] == ["d"] and bad_nodes(late, lasting=True) == {}
    full = {**late, "e": three["a"] | {"free-space": of("full", "bad")}}
    assert bad_nodes(full, lasting=True) == {"e": "free-space: it is full"}
    memory = {
        name: {"memory": of(gb, within=3.0)}
        for name, gb in zip("abcd", (64, 63, 64, 48), strict=True)
    }
    assert [it.node for it in compare(memory)["memory"]] == ["d"]
    apart = {"a": {"memory": of(0.7, within=1.0)}, "b": {"memory": of(-0.7, within=1.0)}}
    assert [it.node for it in compare(apart)["memory"]] == ["a", "b"]
    # What is wrong everywhere, or on one of two nodes that differ, does not count against a node.
    full = {name: {"free-space": of("full", "bad")} for name in "ab"}
    assert bad_nodes(full) == {}
    two = {"a": {"mtu": of("1500")}, "b": {"mtu": of("9000")}}
    assert [it.node for it in compare(two)["mtu"]] == ["a", "b"] and bad_nodes(two) == {}
    table = "\n".join(command.lines({**three, "d": odd}, shows_all=False))
    assert "mtu       odd     d      9000; others: 1500" in table, table
    assert "`ip link set dev IFACE mtu N`" in table and "nodes differ in mtu, packages" in table


def test_the_command_checks_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = command.main(["--quick", "--json", f"--root={tmp_path}/runs"])
    shown = json.loads(capsys.readouterr().out)
    (results,) = shown["nodes"].values()
    states = {each["state"] for each in results.values()}
    assert states <= {"ok", "warning", "bad", "not applicable"}
    assert code == int("bad" in states) and results["writing"]["state"] == "ok"
    assert not any("the check failed" in each["text"] for each in results.values()), results
    assert not list(tmp_path.iterdir())


def test_reports_about_nodes_expire_and_can_be_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    NodeReport(time.time() - KEPT - 1, "c", "old", "ECC").keep()
    for host in ("n1", "n2"):
        NodeReport(time.time(), "c", host, "mtu: 1400").keep()
    file = NodeReport.folder() / NodeReport.FILE
    file.write_bytes(file.read_bytes() + b'\x00damaged\n{"time": 1')
    assert [it.host for it in NodeReport.current("c")] == ["n1", "n2"]
    assert NodeReport.current("other") == []
    assert nodes_command.main(["--forget", "n1"]) == 0
    assert nodes_command.main([]) == 0
    shown = capsys.readouterr().out
    assert "n2" in shown and "mtu: 1400" in shown and "n1" not in shown
    NodeReport(time.time(), "c", "n3", "ECC").keep()
    with pytest.raises(RefusedError, match=r"n7: .* names this node; the reports name n2, n3"):
        nodes_command.main(["--forget", "n7"])
    assert nodes_command.main(["--forget"]) == 0 and NodeReport.current() == []
