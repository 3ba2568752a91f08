"""The list of lines that depend on a GPU is complete."""

import re

import gpu_lines


def test_every_line_that_depends_on_a_gpu_is_listed() -> None:
    listed = gpu_lines.read()
    found = gpu_lines.find()
    assert listed.keys() == found.keys(), "run `./env/run python tests/gpu_lines.py write`"


def test_the_tests_in_the_list_exist() -> None:
    for by in set(gpu_lines.read().values()):
        if by.startswith(gpu_lines.NEVER):
            continue
        file, _, name = by.strip("`").partition("::")
        assert re.search(rf"def {name}\b", (gpu_lines.ROOT / file).read_text()), by


def test_for_every_line_that_never_ran_there_is_a_reason() -> None:
    never = {line[:2] for line, by in gpu_lines.read().items() if by.startswith(gpu_lines.NEVER)}
    assert never == gpu_lines.REASONS.keys()
