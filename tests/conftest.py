"""How tests are chosen and dealt out: side by side, and the long ones only where they are named."""

from __future__ import annotations

import gc
import os
import signal
import sys
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

# Read when torch is imported, here and in the processes of tests, of which several share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of processes import rollcall, and each worker the tests: compile them once.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Ignored in a background job and under nohup. A handler is not inherited by the programs of tests.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)
USUAL = "not long and not campaign"
MOST_WORKERS = 8
MODELS_APART = ("[text-", "experts")
"""Models of the table of strategies, by what names of their tests have."""
CLUSTERS = {"slurm", "frameworks"}
"""Folders whose tests need a cluster: all of them are long."""
COUNTED = pytest.StashKey[float]()
QUICK_SECONDS = 0.2
"""A shorter test is not asked for its processes; what they cost counts for a later test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the length of the list at the end."""
    parser.addoption(
        "--costs", type=int, default=30, help="list the tests that cost most CPU time (0: all)"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Deal folders out to several processes, without the long tests; run a named file as it is."""
    options = config.option
    names_files = any(".py" in word for word in config.args)
    if not (options.markexpr or options.keyword or names_files):
        options.markexpr = USUAL
    is_alone = names_files or options.usepdb or options.collectonly or options.capture == "no"
    is_asked = getattr(options, "numprocesses", 0) is not None  # with -n, or without the plugin
    if not (is_alone or is_asked or hasattr(config, "workerinput")):
        # More than cores: tests wait for their processes, long ones also for Slurm.
        options.numprocesses = min(3 * len(os.sched_getaffinity(0)), MOST_WORKERS)
        options.dist, options.loadscopereorder = "loadscope", False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one process run a whole file, so that it makes the fixtures of a module once."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            if "/gpu/" in path:
                return "gpu"  # in order, with one report
            if "::test_command_works[" in nodeid:  # the documented commands, page by page
                return f"{path} {bisect('fp', nodeid.partition('[')[2])}"
            if path.endswith("/test_strategies.py"):  # its models have nothing in common
                return path + "".join(part for part in MODELS_APART if part in nodeid)
            return "linuxproc" if "[linuxproc" in nodeid else path

    return Scheduler(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Let Python's collections leave out what is imported: each training makes one."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        session.config.stash[COUNTED] = cpu_seconds(with_running=False)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with files of long tests, then of many, so that no worker is alone at the end."""
    if not hasattr(config, "workerinput"):
        return
    lengths, counts = dict[Path, float](), Counter(item.path for item in items)
    for item in items:
        limit = item.get_closest_marker("timeout")
        lengths[item.path] = max(lengths.get(item.path, 0), limit.args[0] if limit else 0)
    items.sort(key=lambda item: (-lengths[item.path], -counts[item.path]))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that need a cluster as long."""
    if item.path.parent.name in CLUSTERS and not item.get_closest_marker("campaign"):
        item.add_marker(pytest.mark.long)


def cpu_seconds(with_running: bool) -> float:
    """Return the CPU time of this process and its descendants, ended or (`with_running`) not."""
    times = [os.times()[:4]]
    for process in psutil.Process().children(recursive=True) if with_running else []:
        with suppress(psutil.NoSuchProcess):
            times.append(process.cpu_times()[:4])
    return sum(map(sum, times))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note in the report what this part of the test cost, fixtures and processes included."""
    report = yield
    total = cpu_seconds(with_running=call.duration > QUICK_SECONDS)
    spent = max(0.0, total - item.config.stash[COUNTED])
    report.user_properties.append(("cpu_seconds", spent))
    item.config.stash[COUNTED] = max(total, item.config.stash[COUNTED])
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """List the tests that cost most: CPU seconds, and beside them those of the clock."""
    cpu, wall = defaultdict[str, float](float), defaultdict[str, float](float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            noted = dict(getattr(report, "user_properties", ()))
            if "cpu_seconds" in noted:
                cpu[report.nodeid] += noted["cpu_seconds"]
                wall[report.nodeid] += report.duration
    if not cpu:
        return
    terminalreporter.section(
        f"CPU seconds: {sum(cpu.values()):.0f} in {len(cpu)} tests, the most in"
    )
    most = sorted(cpu.items(), key=lambda cost: -cost[1])
    for nodeid, seconds in most[: config.option.costs or None]:
        terminalreporter.write_line(f"{seconds:7.1f} in {wall[nodeid]:6.1f} s  {nodeid}")
