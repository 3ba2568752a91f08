"""The list of the uses of a GPU is complete."""

import re

import gpu_lines
from checkout import ROOT


def test_every_use_of_a_gpu_is_listed() -> None:
    listed, found = gpu_lines.read(), gpu_lines.find()
    assert listed.keys() == found.keys(), "run `./env/run python tests/helpers/gpu_lines.py write`"


def test_the_tests_in_the_list_exist() -> None:
    modules = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for by in set(gpu_lines.read().values()):
        if not by.startswith(gpu_lines.NEVER):
            module, _, name = by.strip("`").partition("::")
            assert re.search(rf"def {name}\b", modules[module]), by


def test_for_every_use_that_never_ran_there_is_a_reason() -> None:
    never = {use[0] for use, by in gpu_lines.read().items() if by.startswith(gpu_lines.NEVER)}
    assert never == gpu_lines.REASONS.keys()
