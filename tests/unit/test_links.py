"""Every link between pages leads to a file and a heading of this checkout; no network is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import ROOT, script_of_docs

website = script_of_docs("website")
FOLDERS = ("docs", "launch", "rollcall", "slurm", "tests", "train")
PAGES = [path for name in FOLDERS for path in sorted((ROOT / name).rglob("*.md"))]
PAGES += sorted(ROOT.glob("*.md"))


def problems(page: Path) -> list[str]:
    """Return the links of a page that lead nowhere."""
    found = []
    for link, target, anchor in website.links(page):
        if not target.is_file():
            found.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in website.anchors(target):
            found.append(f"{link}: no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert problems(page) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "# A `b` & c: d\n[1](page.md#a-b--c-d) [2](gone.md) [3](#gone)\n```\n[4](gone)\n```\n"
    page.write_text(text + "[5](https://example.org/gone)\n")
    assert problems(page) == ["gone.md: no such file", "#gone: no such heading"]


def test_every_page_is_listed_in_order() -> None:
    listed = [page for section in website.navigation() for page in next(iter(section.values()))]
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {*listed} and len(listed) == len({*listed})
    text = (ROOT / "docs" / "README.md").read_text()
    numbers = [int(line.partition(".")[0]) for line in text.splitlines() if line[:1].isdigit()]
    assert numbers == list(range(1, len(numbers) + 1))
