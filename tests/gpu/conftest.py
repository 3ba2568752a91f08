"""The order of the first hour on a GPU, and a report of it: runs/gpu-report.md and .json."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollcall.tools.accept.page import Page, Row
from rollcall.tools.bench import turns

HERE = Path(__file__).parent
REPORT = HERE.parents[1] / "runs" / "gpu-report"
NO_GPU = "torch sees no GPU; on a machine with one: ./env/run pytest tests/gpu"
page = Page(f"tests/gpu, {time.strftime('%Y-%m-%d')}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if HERE in item.path.parents and (report.when == "call" or report.outcome != "passed"):
        row = Row(item.name, "passed", report.duration, str(getattr(item, "obj", None).__doc__))
        if report.failed:
            row = replace(row, state="failed", text=call_error(report))
        elif report.skipped:
            row = replace(row, state="not applicable", text=skipped(report))
        page.rows.append(row)
    return report


def call_error(report: pytest.TestReport) -> str:
    """Return the last line of a failure that says something."""
    found = [line for line in report.longreprtext.splitlines() if line.startswith("E  ")]
    return found[0][1:].strip() if found else report.longreprtext[-200:]


def skipped(report: pytest.TestReport) -> str:
    """Return why a test was skipped."""
    place = report.longrepr
    return str(place[2]).removeprefix("Skipped: ") if isinstance(place, tuple) else str(place)


def pytest_sessionfinish() -> None:
    if any(row.state != "not applicable" for row in page.rows):  # keep the report of a GPU
        page.facts = turns.surroundings()
        REPORT.parent.mkdir(exist_ok=True)
        page.write(REPORT)
        print(f"\nwritten: {REPORT}.md and {REPORT}.json")
