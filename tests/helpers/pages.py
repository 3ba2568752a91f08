"""The Python blocks of docs/python.md, and what they print."""

from __future__ import annotations

import re

from checkout import ROOT

SHOWN = re.compile(
    r"(?s)[0-9]+ \w+\n0\.\d+\n"  # a function
    r"done .*rank 1 of 2: loss 0\.\d+\n"  # its job
    r".*rank 0 of 2: loss 0\.\d+\n.*loss 0\.\d+\n"  # ranks on this machine
    r"0\.01 0\.\d+\n0\.03 0\.\d+\n0\.1 0\.\d+\n"  # many runs
    r".*rank [01] on \S+ \(node 0\) raised ZeroDivisionError.*"  # failures
    r"nodes: expected a whole number of at least 1, not 'two'.*\n"
    r".*\n10\n"  # continue after a failure
    r"done 0\.25\n"  # debug
    r"digits done [0-9.e-]+\n\[1, 5, 10, 15, 20\] \[.*\]\n\[.*\]\n"  # records
    r"\[0\.\d+, 0\.\d+\]\n"  # two together
)


def python_page() -> list[str]:
    """Return the blocks in order."""
    page = (ROOT / "docs" / "python.md").read_text()
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def shown(output: str) -> bool:
    """Return True if an output has everything that the blocks print, in order."""
    return SHOWN.search(output) is not None
