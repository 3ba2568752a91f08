"""Divide the work on one output file into parts, each written atomically. No torch."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcall.config import ConfigError
from rollcall.system.files import read_object, sync, write_atomic

if TYPE_CHECKING:
    from rollcall.train.ranks.world import World


class Parts:
    """The parts of one output file, in a directory next to it until all are complete."""

    def __init__(self, output: Path, world: "World") -> None:
        self._output = output
        self._directory = output.with_name(f"{output.name}.parts")
        self.world = world
        self.samples = 0
        self.size = 1  # samples of a part

    def begin(self, facts: dict[str, Any], samples: int, size: int) -> None:
        """Begin, or continue with existing parts and their size; all parts have the same facts.

        Raises:
            ConfigError: the output file exists, or the existing parts have other facts.
        """
        with self.world.together():
            if self.world.is_main:
                try:
                    size = self._begin({**facts, "samples": samples}, size)
                except OSError as error:
                    text = f"{self._directory}: cannot write: {error.strerror}"
                    raise ConfigError(text) from None
        self.samples = samples
        self.size = int(self.world.broadcast(size))

    def indices(self, part: int) -> range:
        """Return the indices of the samples of a part."""
        return range(part * self.size, min((part + 1) * self.size, self.samples))

    def missing(self) -> list[int]:
        """Return the missing parts, the same on every rank."""
        numbers = range(-(-self.samples // self.size)) if self.world.is_main else ()
        missing = [number for number in numbers if not self.path(number).exists()]
        return list(self.world.broadcast(missing))

    def path(self, part: int) -> Path:
        """Return the file of a part."""
        return self._directory / f"{part:08d}{self._output.suffix}"

    def join(self, join: Callable[[Sequence[Path], Path], None]) -> None:
        """Make one file of all parts with `join`; call it on one rank."""
        whole = self._directory / f"whole{self._output.suffix}"
        join([self.path(part) for part in range(-(-self.samples // self.size))], whole)
        sync(whole)
        whole.replace(self._output)
        sync(self._output.parent)
        shutil.rmtree(self._directory)

    def _begin(self, facts: dict[str, Any], size: int) -> int:
        plan = self._directory / "plan.json"
        if not plan.exists():
            if self._output.exists():
                text = f"--output {self._output} exists; delete it, or choose another file"
                raise ConfigError(text)
            self._directory.mkdir(parents=True, exist_ok=True)
            write_atomic(plan, json.dumps({"size": size, **facts}) + "\n")
        before = read_object(plan) or {}
        changed = [name for name in facts if facts[name] != before.get(name)]
        if changed:
            raise ConfigError(
                f"{self._directory} contains parts of another prediction ({', '.join(changed)} "
                "differ); delete it, or choose another --output"
            )
        for path in self._directory.glob(".*"):  # left by killed writers
            path.unlink()
        return int(before.get("size", size))
