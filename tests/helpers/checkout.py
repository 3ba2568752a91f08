"""The checkout that is tested, and the folders of it that tests import from."""

import argparse
import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
CAMPAIGNS = ROOT / "tests" / "campaigns"
SHORT_TEXT = f"data.path={argparse.__file__}"
"""A short text: to evaluate one of the usual length would take most of the time of a test."""


PACED = "train.callbacks=tests.helpers.user_tasks:Paced"
"""Leaves the CPU to others, in a run without an end that a test waits for or acts on."""


def script_of_docs(name: str) -> ModuleType:
    """Import a script of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
