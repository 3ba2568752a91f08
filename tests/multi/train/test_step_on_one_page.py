"""How much code a reader must know to understand a step: its functions, counted while they run."""

from __future__ import annotations

import ast
import itertools
import json
import sys
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from ranks import together
from torch import nn

from rollcall.cli.installation import ROOT
from rollcall.train import models
from rollcall.train.main import main

FIRST, LAST = 20, 24
"""Forward passes of a training between which functions are noted."""
LINES, FILES = 540, 12
"""The most that a step may run through, without what is in ELSEWHERE; see docs/architecture.md."""
ELSEWHERE = ("Loading._timed", "report", "settle", "Trainer._between", "Watchdog._count")
"""What begins rooms of their own: reading data, what the members of a step do, saving."""
WORDS = ["digits", "parallel.strategy=ddp", "device=cpu", "train.steps=30"]
WORDS += ["checkpoint.every=null", "train.evaluate_every=null", "log.every=1"]


class Noted:
    """Notes the functions of rollcall that run, but for those that begin ELSEWHERE."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, int]] = set()
        self._elsewhere: list[FrameType] = []

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        """Be called when a function begins or ends."""
        if event == "call" and not self._elsewhere:
            if _begins_elsewhere(frame.f_code):
                self._elsewhere.append(frame)
            else:
                self.note(frame.f_code)
        elif event == "return" and self._elsewhere and frame is self._elsewhere[-1]:
            self._elsewhere.pop()

    def note(self, code: CodeType) -> None:
        """Note a function of rollcall's."""
        if code.co_filename.startswith(str(ROOT / "rollcall")):
            self.functions.add((code.co_filename, code.co_firstlineno))


def _begins_elsewhere(code: CodeType) -> bool:
    owner, _, name = code.co_qualname.rpartition(".")
    is_own = owner in ("Steps", "Agreement", "Trainer", "Update")
    return code.co_qualname in ELSEWHERE or (name in ELSEWHERE and not is_own)


def train(rank: int, folder: Path) -> None:
    """Be a rank that writes which functions have run between two forward passes."""
    passes, noted, build = itertools.count(1), Noted(), models.build

    def note(module: nn.Module, _: Any) -> None:
        number = next(passes) if module.training and torch.is_grad_enabled() else 0
        if number == FIRST:
            sys.setprofile(noted.see)
        elif number == LAST:
            sys.setprofile(None)
            frame: FrameType | None = sys._getframe()
            while frame:
                noted.note(frame.f_code)
                frame = None if frame.f_code.co_qualname == "Steps.run" else frame.f_back
            (folder / f"functions-{rank}.json").write_text(json.dumps(sorted(noted.functions)))

    def watched(*args: Any) -> nn.Module:
        model = build(*args)
        model.register_forward_pre_hook(note)
        return model

    setattr(models, "build", watched)  # noqa: B010
    assert main([*WORDS, f"run.root={folder}"]) == 0


def lines_of(functions: list[tuple[str, int]]) -> dict[str, int]:
    """Return the lines of these functions by file; one inside another counts once."""
    found: dict[str, set[int]] = defaultdict(set)
    for file, first in functions:
        for node in ast.walk(ast.parse(Path(file).read_text())):
            if isinstance(node, ast.FunctionDef):
                begin = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
                if first in (begin, node.lineno):
                    found[file].update(range(begin, (node.end_lineno or begin) + 1))
    return {str(Path(file).relative_to(ROOT)): len(rows) for file, rows in found.items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_fits_on_a_few_pages(tmp_path: Path, ranks: int) -> None:
    together(ranks, train, tmp_path)
    found = lines_of(json.loads((tmp_path / "functions-0.json").read_text()))
    for file, lines in sorted(found.items()):
        print(f"{lines:5}  {file}")
    print(f"{sum(found.values())} lines in {len(found)} files")
    assert sum(found.values()) <= LINES and len(found) <= FILES
