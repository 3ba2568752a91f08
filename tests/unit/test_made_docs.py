"""The reference and the pictures in docs match what docs/make.py makes from the code."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

MAKE = Path(__file__).parents[2] / "docs" / "make.py"


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Python 3.13 prints options differently")
def test_what_is_made_is_current() -> None:
    spec = importlib.util.spec_from_file_location("make", MAKE)
    assert spec is not None and spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    for path, text in make.pages().items():
        assert path.read_text() == text, f"{path.name} is out of date: run docs/make.py"
