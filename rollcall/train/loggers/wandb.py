"""Log a run to Weights & Biases, also offline; a requeued run continues as the same one."""

import hashlib
import importlib
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollcall.records.run import LoggedStep
from rollcall.system.files import read_lines
from rollcall.train.loggers import Once, last_in_metrics, numbers_of
from rollcall.train.ranks.run import Run

BLOCK = 2**15
"""Bytes of a block in W&B's files, which have the log format of LevelDB."""


class Wandb:
    """Logs with the package wandb; WANDB_MODE=offline writes files alone."""

    def __init__(self, run: Run, project: str = "rollcall", entity: str | None = None) -> None:
        """Start or continue the run of this directory."""
        wandb: Any = importlib.import_module("wandb")

        path = run.run_dir.path.absolute()
        self._run = wandb.init(
            project=project,
            entity=entity,
            name=run.run_dir.name,
            id=f"{run.run_dir.name}-{hashlib.blake2b(bytes(path), digest_size=4).hexdigest()}",
            dir=str(path),
            config=run.config.model_dump(),
            resume="allow",
        )
        self._once = Once(last_in_metrics(run))
        if self._run.offline:  # a killed rank may not have written its newest steps
            held = _last_held(path)
            self._once = Once(lambda name: held.get(name, -1))
            for line in read_lines(run.run_dir.path / LoggedStep.FILE):
                self.logged(line.get("step", 0), numbers_of(line))

    def logged(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the values of a step that are new: files of several attempts are put together."""
        if new := self._once.new(step, values):
            self._run.log(new, step=step)

    def close(self) -> None:
        """Write what is buffered."""
        self._run.finish()


def _last_held(path: Path) -> dict[str, int]:
    """Return the last step of each name in the files of offline attempts."""
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    last: dict[str, int] = {}
    for file in path.glob("wandb/offline-run-*/*.wandb"):
        for content in _records(file.read_bytes()):
            items = record.FromString(content).history.item
            named = {item.key or item.nested_key[0]: item.value_json for item in items}
            step = int(named.pop("_step", -1))
            last |= {name: max(step, last.get(name, -1)) for name in named}
    return last


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file, up to one that was not written whole."""
    at, content = 7, b""  # behind the header of the file
    while at + 7 <= len(data):
        checksum, length, kind = struct.unpack_from("<IHB", data, at)
        at += 7 + length
        if zlib.crc32(data[at - length - 1 : at]) != checksum:
            return
        content += data[at - length : at]
        if kind in (1, 4):  # a whole record, or its end
            yield content
            content = b""
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
