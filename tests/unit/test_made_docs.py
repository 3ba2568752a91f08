"""The reference and the pictures in docs match what docs/make.py makes from the code."""

from __future__ import annotations

import sys

import pytest
from checkout import script_of_docs


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Python 3.13 prints options differently")
def test_what_is_made_is_current() -> None:
    for path, text in script_of_docs("make").pages().items():
        assert path.read_text() == text, f"{path.name} is out of date: run docs/make.py"
