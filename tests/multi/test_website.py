"""The documentation is built as a website, with what docs/site.md says."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from checkout import ROOT

COMMAND = re.compile(r"^(\./env/run --with (\S+) python docs/website\.py) /var/www/rollcall$", re.M)
pytestmark = pytest.mark.long


@pytest.mark.timeout(1200)
def test_the_command_of_the_page_builds_the_website(tmp_path: Path) -> None:
    found = COMMAND.search((ROOT / "docs" / "site.md").read_text())
    assert found is not None
    ready = subprocess.run(
        [ROOT / "env/run", "--with", found[2], "true"], capture_output=True, text=True
    )
    if ready.returncode and "CI" not in os.environ:
        pytest.skip(f"env/run --with {found[2]}: {ready.stderr.strip()[-200:]}")
    words = [*found[1].split(), str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    start = (tmp_path / "index.html").read_text()
    assert 'href="docs/slurm-tutorial/"' in start and "Train your own model" in start
    assert (tmp_path / "docs" / "images" / "report.png").exists()
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r'(?:src|<link[^>]*rel="stylesheet"[^>]*href)="(.*?)"', page.read_text()
        )
        assert not [name for name in loaded if "//" in name], f"{page} loads from another host"
