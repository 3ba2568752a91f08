"""GPUs, as nvidia-smi, dcgmi and the kernel's log describe them."""

import contextlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from rollcall.launch.doctor.check import Failed, Found, Node, Skip, State, judge, ok, warn
from rollcall.text import listed

FATAL_XIDS = {48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 156, 158}
"""After these errors NVIDIA's catalog asks for a reset of the GPU or a restart of the machine."""
DAY = 24 * 3600.0
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


def driver(node: Node) -> Found:
    version = _smi(node).findtext("driver_version", "unknown")
    return ok(version, version)


def gpu_count(node: Node) -> Found:
    text, asked = f"{len(_gpus(node))}", node.env.get("SLURM_GPUS_ON_NODE", "0")
    few = asked.isdecimal() and int(asked) > int(text)
    return judge(few and f"{text}, though the job has {asked}", text, text)


def xid(node: Node) -> Found:
    try:
        log = node.run("dmesg")
    except Failed as error:
        raise Skip(f"the kernel's log cannot be read: {error}") from None
    now = float((node.read("/proc/uptime") or "0").split()[0])
    found = re.findall(r"\[ *([\d.]+)\] NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", log)
    found = [code for code in found if float(code[0]) > now - DAY]  # older ones may be repaired
    fatal = [code for code in found if int(code[2]) in FATAL_XIDS]
    text = listed([f"Xid {number} on {place}" for _, place, number in fatal or found], 3)
    return judge(text, "none", state="bad" if fatal else "warning")


def gpu_memory(node: Node) -> Found:
    visible = node.env.get("CUDA_VISIBLE_DEVICES", "")
    found = []
    for name, gpu in _gpus(node).items():
        amount = gpu.findtext("fb_memory_usage/used", "")
        users = gpu.findall("processes/process_info")
        # A desktop draws with the GPU ("G"); programs that compute are "C" or "C+G".
        who = [it.findtext("pid", "") for it in users if "C" in it.findtext("type", "C")]
        is_own = not visible.replace(",", "").isdecimal() or name in visible.split(",")
        if is_own and (who or (not users and _number(amount) > 2048)):
            found.append(f"GPU {name}: {amount} by {listed(who, 3) or 'nobody'}")
    return judge(listed(found, 4), "nobody uses the job's GPUs")


def fabric_manager(node: Node) -> Found:
    if all(gpu.findtext("fabric/state", "N/A") == "N/A" for gpu in _gpus(node).values()):
        raise Skip("these GPUs have no NVSwitch")
    now = {name: gpu.findtext("fabric/state", "") for name, gpu in _gpus(node).items()}
    wrong = [f"GPU {name}: {state}" for name, state in now.items() if state != "Completed"]
    return judge(listed(wrong, 4), "the fabric is ready")


def nvlink(node: Node) -> Found:
    rows: list[str] = []
    with contextlib.suppress(Failed):  # what GPUs without NVLink answer depends on the driver
        rows = re.findall(r"Link \d+: (.+)", node.run("nvidia-smi", "nvlink", "-s"))
    if not rows:
        raise Skip("these GPUs have no NVLink")
    down = sum("inactive" in row.lower() for row in rows)
    text = f"{len(rows) - down} of {len(rows)} links are up"
    return warn(down and text, text, text)  # all are down in a virtual machine or without a bridge


def peer_access(node: Node) -> Found:
    if len(_gpus(node)) < 2:
        raise Skip("there is one GPU")
    rows = re.findall(r"^ ?GPU\d+\s+(.+)$", node.run("nvidia-smi", "topo", "-p2p", "r"), re.M)
    cells = [cell for row in rows for cell in row.split() if "GPU" not in cell]
    wrong = sum(cell not in ("X", "OK") for cell in cells)
    return warn(wrong and f"{wrong // 2} pairs cannot reach each other", "all pairs")


def dcgm(node: Node) -> Found:
    try:
        answer = node.run("dcgmi", "diag", "-r", "1", seconds=45)
    except Failed as error:
        if "connection" in str(error):  # with nv-hostengine, which need not run
            raise Skip(str(error)) from None
        raise
    rows = re.findall(r"^\|\s*([\w /-]+?)\s*\|\s*(Fail|Warn)\b", answer, re.M)
    fails = any(result == "Fail" for _, result in rows)
    text = ", ".join(f"{name}: {result}" for name, result in rows)
    return judge(text, "its quick diagnosis passes", state="bad" if fails else "warning")


def _smi(node: Node) -> Element:
    return ElementTree.fromstring(node.run("nvidia-smi", "-q", "-x"))


def _gpus(node: Node) -> dict[str, Element]:
    """Return nvidia-smi's description of each GPU, by its number."""
    try:
        found = {str(number): gpu for number, gpu in enumerate(_smi(node).findall("gpu"))}
    except Failed:
        raise Skip("nvidia-smi fails: see driver") from None
    if not found:
        raise Failed("nvidia-smi lists no GPU")
    return found


def _each(wrong: Callable[[Element], str], path: str, state: State, node: Node) -> Found:
    """Do a check of FIELDS."""
    gpus = _gpus(node)
    found = [f"GPU {name}: {text}" for name, gpu in gpus.items() if (text := wrong(gpu))]
    values = ", ".join(sorted({gpu.findtext(path, "N/A") for gpu in gpus.values()})) if path else ""
    return judge(listed(found, 4), values or f"none of {len(gpus)} GPUs", values or None, state)


def _disabled(gpu: Element, path: str) -> str:
    return "Disabled" if gpu.findtext(path) == "Disabled" else ""


def _with(gpu: Element, text: str, paths: Sequence[str]) -> str:
    """Return the paths that have this text."""
    return listed([path for path in paths if gpu.findtext(path) == text])


def _below(gpu: Element, path: str, now_at: str, most_at: str, share: float = 1.0) -> str:
    now, limit = (gpu.findtext(path.format(it)) for it in (now_at, most_at))
    return f"{now} of {limit}" if 0 < _number(now) < share * _number(limit) else ""


def _uncorrectable(gpu: Element) -> str:
    counts = gpu.iterfind("ecc_errors/volatile/*")
    bad = sum(_number(it.text) for it in counts if "uncorrectable" in it.tag)
    return f"{bad:.0f} uncorrectable" if bad else ""


def _number(text: str | None) -> float:
    match = re.match(r"[\d.]+", text or "")
    return float(match[0]) if match else 0.0


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
"""What is wrong with one GPU, the value that is compared over the nodes, and how bad it is."""
EACH = {name: partial(_each, *row) for name, row in FIELDS.items()}
"""The checks of one value of each GPU."""
