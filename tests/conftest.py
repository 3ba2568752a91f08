"""How tests are chosen and dealt out: side by side, and the long ones only where they are named."""

from __future__ import annotations

import gc
import os
from bisect import bisect
from collections.abc import Generator
from typing import Any

import pytest

# Read when torch is imported, here and in the processes of tests, of which several share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
MOST_WORKERS = 8
CLUSTERS = {"slurm", "frameworks"}
"""Folders whose tests need a cluster: all of them are long."""


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
