"""Make docs/images/report.png and report-phone.png: the report of README's first command.

    ./env/run python docs/screenshots.py

It needs chromium. A screenshot differs with the machine, so no test compares it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from browser import DESKTOP, PHONE, browser  # noqa: E402

PICTURES = (
    (DESKTOP, "report.png", "light", 1250, 0.75),
    (PHONE, "report-phone.png", "dark", 844, 0.75),
)
"""Window, file, theme, how many pixels of the page, and the scale of the picture."""
TRAIN = "-m torch.distributed.run --nproc_per_node=4 -m train run.name=digits log.every=1"


def main(folder: Path) -> None:
    """Train, make the report, and take its pictures."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    train = [sys.executable, *TRAIN.split(), f"run.root={folder}"]
    report = [sys.executable, "-m", "rollcall", "report", "digits", f"--root={folder}"]
    file = folder / "report.html"
    for command in (train, [*report, "-o", str(file)]):
        subprocess.run(command, cwd=ROOT, env=env, check=True)
    with browser(folder / "profile") as page:
        for size, name, theme, height, scale in PICTURES:
            page.open(file.as_uri(), size)
            page.picture(ROOT / "docs" / "images" / name, theme, height, scale)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(Path(place))
