"""How tests are chosen and dealt out: side by side, and the long ones only where they are named."""

from __future__ import annotations

import gc
import os
from bisect import bisect
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import psutil
import pytest

# Read when torch is imported, here and in the processes of tests, of which several share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
MOST_WORKERS = 8
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
        options.markexpr = "not long"
    is_alone = names_files or options.usepdb or options.collectonly or options.capture == "no"
    is_asked = getattr(options, "numprocesses", 0) is not None  # with -n, or without the plugin
    if not (is_alone or is_asked or hasattr(config, "workerinput")):
        options.numprocesses = min(2 * len(os.sched_getaffinity(0)), MOST_WORKERS)
        options.dist = "loadscope"


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
            return "linuxproc" if "[linuxproc" in nodeid else path

    return Scheduler(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let Python's collections leave out what is imported: each training makes one."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that need a cluster as long."""
    if item.path.parent.name in CLUSTERS:
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
    report.cpu_seconds = max(0.0, total - item.config.stash.get(COUNTED, 0.0))
    item.config.stash[COUNTED] = max(total, item.config.stash.get(COUNTED, 0.0))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """List the tests that cost most: CPU seconds, and beside them those of the clock."""
    cpu, wall = Counter[str](), Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "cpu_seconds"):
                cpu[report.nodeid] += report.cpu_seconds
                wall[report.nodeid] += report.duration
    terminalreporter.section(f"CPU seconds: {cpu.total():.0f} in {len(cpu)} tests, the most in")
    for nodeid, seconds in cpu.most_common(config.option.costs or None):
        terminalreporter.write_line(f"{seconds:7.1f} in {wall[nodeid]:6.1f} s  {nodeid}")
