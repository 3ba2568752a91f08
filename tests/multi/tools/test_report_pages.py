"""Reports of real runs in a real browser: their layout, their scripts, and what they load."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import browser
import pytest
from browser import DESKTOP, PHONE, Page
from made_runs import add_phases, make
from ranks import Ranks

from rollcall.records.run_dir import RunDir
from rollcall.tools.report import command

WORDS = ["digits", "device=cpu", "log.every=1", "checkpoint.every=10", "model.name=mlp"]
LOADED = "document.querySelectorAll('figure svg').length"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    browser.require()
    with browser.browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, page: Page) -> dict[str, Path]:  # noqa: ARG001
    """Reports of a finished run, of one that is live, and of that one when a rank was killed."""
    root = tmp_path_factory.mktemp("runs")
    where = f"run.root={root}"
    finished = Ranks(
        2, [*WORDS, where, "run.name=finished", "train.steps=30"], root / "finished-log"
    )
    assert finished.wait() == [0, 0], finished.output()
    words = [*WORDS, where, "run.name=live", "train.steps=1000000", "train.evaluate_every=1"]
    live = Ranks(2, words, root / "live-log")
    run = RunDir(root, "live")

    def report(*names: str) -> str:
        return command.build(names, str(root))[0]

    try:
        deadline = time.monotonic() + 500
        while len(run.read_metrics()) < 40 and time.monotonic() < deadline:
            time.sleep(0.1)
        texts = {"live": report("live")}
        live.processes[1].kill()
    finally:
        live.wait()
    add_phases(RunDir(root, "finished"), 30, 2)
    texts["crashed"] = report("live")
    texts["finished"] = report("finished")
    texts["both"] = report("live", "finished")
    return {name: _written(root / f"{name}.html", text) for name, text in texts.items()}


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["finished", "live", "crashed", "both"])
def test_a_report_fits_its_window_and_loads_nothing(
    page: Page, reports: dict[str, Path], name: str, tmp_path: Path
) -> None:
    for size in (DESKTOP, PHONE, (360, 640)):
        page.open(reports[name].as_uri(), size)
        assert page.evaluate(OVERFLOW) <= 0, size
        assert page.evaluate(LOADED) >= 6
        assert page.complaints() == []
        sizes = page.evaluate(
            "[...document.querySelectorAll('figure')].map(f => [...f.querySelectorAll('svg')]"
            ".filter(s => s.getBoundingClientRect().width > 100).length)"
        )
        assert set(sizes) == {1}, sizes  # one picture of each figure is shown
    words = {"live": "running", "finished": "done", "crashed": "failed", "both": "1 failed, 1 done"}
    assert words[name] in page.evaluate("document.querySelector('header').innerText")
    if name == "crashed":
        assert "rank" in page.evaluate("document.querySelector('.failure').innerText")
    for theme, expected in (("light", "rgb(247, 247, 245)"), ("dark", "rgb(19, 22, 25)")):
        page.picture(tmp_path / f"{theme}.png", theme)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == expected


def test_a_chart_has_words_and_shows_values_under_the_pointer(
    page: Page, reports: dict[str, Path]
) -> None:
    page.open(reports["finished"].as_uri(), DESKTOP)
    nameless = (
        "[...document.querySelectorAll('svg')].filter(s => !s.getAttribute('aria-label')).length"
    )
    assert page.evaluate(nameless) == 0
    assert page.evaluate("[...document.querySelectorAll('figcaption')].every(c => c.innerText)")
    assert page.evaluate("document.querySelectorAll('h1').length") == 1
    ids = "(() => { const all = [...document.querySelectorAll('[id]')].map(e => e.id);"
    assert page.evaluate(f"{ids} return all.length - new Set(all).size }})()") == 0
    box = page.evaluate(
        "(() => { const s = document.querySelector('figure svg'); s.scrollIntoView(); "
        "const b = s.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2] })()"
    )
    move = {"x": box[0], "y": box[1]}
    page.call("Input.dispatchMouseEvent", type="mouseMoved", **move)
    shown = page.evaluate("document.querySelector('.tip').innerText")
    assert shown.startswith("step 1") and "Training loss: " in shown
    for kind in ("mousePressed", "mouseReleased"):
        page.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **move)
    assert page.evaluate("document.querySelectorAll('figure.zoomed').length") == 1
    assert page.evaluate(OVERFLOW) <= 0
    assert page.complaints() == []


def test_a_report_says_everything_without_scripts(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["crashed"].as_uri(), PHONE, scripts=False)
    assert page.evaluate("document.querySelectorAll('.tip').length") == 0  # it did not run
    assert page.evaluate(LOADED) >= 6
    text = page.evaluate("document.body.innerText")
    assert "Failures" in text and "optim.lr" in text
    label = page.evaluate("document.querySelector('figure svg').getAttribute('aria-label')")
    assert "Training loss: " in label and " at step 1 to " in label


def test_a_downloaded_chart_needs_no_page(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["finished"].as_uri(), DESKTOP)
    page.evaluate("document.querySelector('.save').click()")
    start, _, data = page.evaluate("document.querySelector('.save').href").partition(",")
    svg = unquote(data)
    assert start.startswith("data:image/svg+xml") and svg.startswith("<svg")
    assert "var(" not in svg and "finished · rollcall" in svg
    assert page.complaints() == []
    assert page.evaluate("document.querySelectorAll('figure.zoomed').length") == 0


@pytest.mark.long
def test_a_large_run_stays_small_and_quick(page: Page, tmp_path: Path) -> None:
    """100,000 steps on 1,024 ranks; the times are generous, because machines differ."""
    make(RunDir(tmp_path, "large"), 100_000, 1024)
    start = time.process_time()
    path = _written(tmp_path / "large.html", command.build(["large"], str(tmp_path))[0])
    assert time.process_time() - start < 30
    assert path.stat().st_size < 2e6
    start = time.monotonic()
    page.open(path.as_uri(), DESKTOP)
    assert page.evaluate(OVERFLOW) <= 0 and page.complaints() == []
    assert time.monotonic() - start < 60
