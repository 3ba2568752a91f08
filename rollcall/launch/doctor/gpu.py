"""GPUs, as nvidia-smi and the kernel's log describe them."""

import contextlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from rollcall.launch.doctor import check
from rollcall.launch.doctor.check import LocalNode, Result, Skip, State, ToolError, judge, warn
from rollcall.messages.text import listed

FATAL_XIDS = {48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 156, 158}
"""After these errors NVIDIA's catalog asks for a reset of the GPU or a restart of the machine."""
PENDING = (
    *("remapped_rows/remapped_row_failure", "remapped_rows/remapped_row_pending"),
    *("retired_pages/pending_blacklist", "retired_pages/pending_retirement"),
)
SLOWED = tuple(
    f"{group}/{prefix}_{kind}slowdown"
    for group in ("clocks_event_reasons", "clocks_throttle_reasons")  # since and before driver 535
    for prefix in (group, group.removesuffix("s"))
    for kind in ("hw_", "hw_thermal_", "hw_power_brake_", "sw_thermal_")
)


def driver(node: LocalNode) -> Result:
    version = _smi(node).findtext("driver_version", "unknown")
    return Result("ok", version, version)


def gpu_count(node: LocalNode) -> Result:
    text, asked = f"{len(_gpus(node))}", node.env.get("SLURM_GPUS_ON_NODE", "0")
    few = asked.isdecimal() and int(asked) > int(text)
    return judge(few and f"{text}, though the job has {asked}", text, text)


def xid(node: LocalNode) -> Result:
    try:
        log = node.run("dmesg")
    except ToolError as error:
        raise Skip(f"the kernel's log cannot be read: {error}") from None
    now = float((node.read("/proc/uptime") or "0").split()[0])
    errors = re.findall(r"\[ *([\d.]+)\] NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", log)
    errors = [error for error in errors if float(error[0]) > now - 86400]  # older may be repaired
    fatal = [error for error in errors if int(error[2]) in FATAL_XIDS]
    text = listed([f"Xid {number} on {address}" for _, address, number in fatal or errors], 3)
    return judge(text, "none", state="bad" if fatal else "warning")


def gpu_memory(node: LocalNode) -> Result:
    visible = node.env.get("CUDA_VISIBLE_DEVICES", "")
    busy = []
    for name, gpu in _gpus(node).items():
        amount = gpu.findtext("fb_memory_usage/used", "")
        users = gpu.findall("processes/process_info")
        # A desktop draws with the GPU ("G"); programs that compute are "C" or "C+G".
        pids = [user.findtext("pid", "") for user in users if "C" in user.findtext("type", "C")]
        is_of_job = not visible.replace(",", "").isdecimal() or name in visible.split(",")
        if is_of_job and (pids or (not users and check.number(amount) > 2048)):
            busy.append(f"GPU {name}: {amount} used by {listed(pids, 3) or 'no process'}")
    return judge(listed(busy, 4), "no other process uses the job's GPUs")


def fabric_manager(node: LocalNode) -> Result:
    if all(gpu.findtext("fabric/state", "N/A") == "N/A" for gpu in _gpus(node).values()):
        raise Skip("these GPUs have no NVSwitch")
    now = {name: gpu.findtext("fabric/state", "") for name, gpu in _gpus(node).items()}
    wrong = [f"GPU {name}: {state}" for name, state in now.items() if state != "Completed"]
    return judge(listed(wrong, 4), "the fabric is ready")


def nvlink(node: LocalNode) -> Result:
    rows: list[str] = []
    with contextlib.suppress(ToolError):  # what GPUs without NVLink answer depends on the driver
        rows = re.findall(r"Link \d+: (.+)", node.run("nvidia-smi", "nvlink", "-s"))
    if not rows:
        raise Skip("these GPUs have no NVLink")
    down = sum("inactive" in row.lower() for row in rows)
    text = f"{len(rows) - down} of {len(rows)} links are up"
    return warn(down and text, text, text)  # all are down in a virtual machine or without a bridge


def _smi(node: LocalNode) -> Element:
    return ElementTree.fromstring(node.run("nvidia-smi", "-q", "-x"))


def _gpus(node: LocalNode) -> dict[str, Element]:
    """Return nvidia-smi's description of each GPU, by its number."""
    try:
        gpus = {str(number): gpu for number, gpu in enumerate(_smi(node).findall("gpu"))}
    except ToolError:
        raise Skip("nvidia-smi fails: see driver") from None
    if not gpus:
        raise ToolError("nvidia-smi lists no GPU")
    return gpus


def _field(wrong: Callable[[Element], str], path: str, state: State, node: LocalNode) -> Result:
    gpus = _gpus(node)
    problems = [f"GPU {name}: {text}" for name, gpu in gpus.items() if (text := wrong(gpu))]
    values = ", ".join(sorted({gpu.findtext(path, "N/A") for gpu in gpus.values()})) if path else ""
    return judge(listed(problems, 4), values or f"none of {len(gpus)} GPUs", values or None, state)


def _disabled(gpu: Element, path: str) -> str:
    return "Disabled" if gpu.findtext(path) == "Disabled" else ""


def _with(gpu: Element, text: str, paths: Sequence[str]) -> str:
    """Return the paths that have this text."""
    return listed([path for path in paths if gpu.findtext(path) == text])


def _below(gpu: Element, path: str, now_at: str, most_at: str, share: float = 1.0) -> str:
    now, limit = gpu.findtext(path.format(now_at)), gpu.findtext(path.format(most_at))
    return f"{now} of {limit}" if 0 < check.number(now) < share * check.number(limit) else ""


def _uncorrectable(gpu: Element) -> str:
    counts = gpu.iterfind("ecc_errors/volatile/*")
    bad = sum(check.number(count.text) for count in counts if "uncorrectable" in count.tag)
    return f"{bad:.0f} uncorrectable" if bad else ""


ECC, PERSISTENCE = "ecc_mode/current_ecc", "persistence_mode"
LANES = "pci/pci_gpu_link_info/link_widths/{}_link_width"
CLOCK, POWER = "{}applications_clocks/graphics_clock", "gpu_power_readings/{}_power_limit"
FIELDS: dict[str, tuple[Callable[[Element], str], str, State]] = {
    "gpu_model": (lambda _: "", "product_name", "warning"),
    "ecc": (partial(_disabled, path=ECC), ECC, "warning"),
    "persistence": (partial(_disabled, path=PERSISTENCE), PERSISTENCE, "warning"),
    "ecc_errors": (_uncorrectable, "", "bad"),
    "remapped_rows": (lambda gpu: _with(gpu, "Yes", PENDING), "", "bad"),
    "throttling": (lambda gpu: _with(gpu, "Active", SLOWED), "", "bad"),
    "gpu_clocks": (lambda gpu: _below(gpu, CLOCK, "", "default_"), CLOCK.format(""), "warning"),
    "power_limit": (
        lambda gpu: _below(gpu, POWER, "current", "default", 0.95),
        POWER.format("current"),
        "warning",
    ),
    "pcie": (lambda gpu: _below(gpu, LANES, "current", "max"), LANES.format("current"), "warning"),
}
"""The problem of one GPU, the value that is compared over the nodes, and how bad a problem is."""
FIELD_CHECKS = {name: partial(_field, *row) for name, row in FIELDS.items()}
"""The checks of one value of each GPU."""
