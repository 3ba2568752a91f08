"""Build the documentation as a website, and fail if a link in it leads nowhere.

    ./env/run --with mkdocs-material python docs/website.py [FOLDER]

The README is the first page; docs/README.md gives the order of the others. The pages, and the files
that they link to, keep their places, so the links that work on GitHub work here.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield each link of a page to this checkout: as written, its file, and the part after `#`."""
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = link.partition("#")
            yield link, (page.parent / path).resolve() if path else page, anchor


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for title in HEADING.findall(FENCED.sub("", page.read_text())):
        text = re.sub(r"\]\([^)]*\)", "", title)
        found.add(re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-"))
    return found


def files() -> set[Path]:
    """Return all pages, and the files that they link to, however far from the first page."""
    found: set[Path] = set()
    waiting = [ROOT / "README.md", *DOCS.glob("*.md")]
    while waiting:
        path = waiting.pop()
        if path not in found and path.is_file():
            found.add(path)
            waiting += [target for _, target, _ in links(path)] if path.suffix == ".md" else []
    return found


def navigation() -> list[dict[str, Any]]:
    """Return the menu: the sections and pages of docs/README.md."""
    menu: list[dict[str, Any]] = [{"Home": ["README.md", "docs/README.md"]}]
    for line in (DOCS / "README.md").read_text().splitlines():
        if section := re.fullmatch(r"\*\*(.+)\*\*", line):
            menu.append({section[1]: []})
        elif page := re.match(r"\d+\. \[[^]]*\]\((.+?)\)", line):
            place = (DOCS / page[1]).resolve().relative_to(ROOT)
            next(iter(menu[-1].values())).append(str(place))
    return menu


def main(folder: Path) -> None:
    """Build the website in a folder; exit with 1 if a link or a page is missing."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with tempfile.TemporaryDirectory() as place:
        for path in files():
            copy = place / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        places = {"docs_dir": place, "site_dir": str(folder.absolute())}
        config = load_config(str(DOCS / "mkdocs.yml"), strict=True, nav=navigation(), **places)
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    print(f"{folder}/index.html")


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else "build/docs"))
