"""Work that is cut into parts, each a file that is whole or absent. No torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.run import sync, write_atomic

if TYPE_CHECKING:
    from train.world import World

PLAN = "plan.json"


class Parts:
    """The parts of one output file, in a directory beside it until all are there.

    Attributes:
        samples: how many there are in all.
        size: how many a part has.
    """

    def __init__(self, output: Path, world: World) -> None:
        self._output = output
        self._directory = output.with_name(f"{output.name}.parts")
        self.world = world
        self.samples = 0
        self.size = 1

    def begin(self, facts: dict[str, Any], samples: int, size: int) -> None:
        """Begin, or go on with what is there; then with its size of a part.

        Args:
            facts: what must be the same for parts of one file.

        Raises:
            ConfigError: the output is there already, or its parts are of something else.
        """
        facts = {**facts, "samples": samples}
        problem, text = "", ""
        if self.world.is_main:
            try:
                problem, text = self._begin(facts, size)
            except OSError as error:
                problem = f"{self._directory} cannot be written: {error.strerror}"
        self.world.raise_together(problem)
        self.samples = samples
        self.size = int(self.world.broadcast_text(text))

    def rows(self, part: int) -> range:
        """The samples of a part."""
        return range(part * self.size, min((part + 1) * self.size, self.samples))

    def missing(self) -> list[int]:
        """The parts that are not there, the same answer on every rank."""
        text = ""
        if self.world.is_main:
            numbers = range(-(-self.samples // self.size))
            text = json.dumps([number for number in numbers if not self.path(number).exists()])
        found: list[int] = json.loads(self.world.broadcast_text(text))
        return found

    def path(self, part: int) -> Path:
        """The file of a part."""
        return self._directory / f"{part:08d}{self._output.suffix}"

    def join(self, join: Callable[[Sequence[Path], Path], None]) -> None:
        """Make one file of all parts; called on one rank.

        Args:
            join: writes the parts into a file.
        """
        beside = self._directory / f"whole{self._output.suffix}"
        join([self.path(part) for part in range(-(-self.samples // self.size))], beside)
        sync(beside)
        beside.replace(self._output)
        sync(self._output.parent)
        shutil.rmtree(self._directory)

    def _begin(self, facts: dict[str, Any], size: int) -> tuple[str, str]:
        plan = self._directory / PLAN
        if not plan.exists():
            if self._output.exists():
                return f"{self._output} is there already: remove it, or name another --output", ""
            self._directory.mkdir(parents=True, exist_ok=True)
            write_atomic(plan, json.dumps({"size": size, **facts}) + "\n")
            return "", str(size)
        before = json.loads(plan.read_text())
        size = before.pop("size")
        changed = [name for name in facts if facts[name] != before.get(name)]
        if changed:
            return (
                f"{self._directory} holds parts of something else ({', '.join(changed)} differ): "
                "remove it, or name another --output"
            ), ""
        for path in self._directory.glob(".*"):  # of writers that were killed
            path.unlink()
        return "", str(size)
