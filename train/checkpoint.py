"""What survives? Checkpoints through torch.distributed.checkpoint, each published whole.

A checkpoint is written under a temporary name and renamed when every file is on disk, so a
directory called step-… is complete. Its keys are global names; any world size can load it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from train.config import ConfigError
from train.run import sync, write_atomic
from train.world import World

FORMAT = 1
MANIFEST = "manifest.json"


class Checkpointer:
    """Saves and loads the state of a run; every rank makes each call together.

    Args:
        directory: where the checkpoints of this run lie.
        world: the ranks that save and load.
        keep: how many of the newest stay.
    """

    def __init__(self, directory: Path, world: World, keep: int = 2) -> None:
        self.directory = directory
        self.world = world
        self.keep = keep

    def save(self, step: int, state: dict[str, Any], **facts: Any) -> Path:
        """Write the state after `step` updates and publish it by a rename.

        Args:
            step: how many updates the state contains.
            state: nested dictionaries of tensors and numbers under global names.
            facts: further plain values for the manifest.

        Raises:
            OSError, CheckpointException: it could not be written; earlier ones are untouched.
        """
        final = self.directory / f"step-{step:08d}"
        nonce = self.world.broadcast_text(os.urandom(4).hex())
        beside = self.directory / f".{final.name}.{nonce}"
        beside.mkdir(parents=True, exist_ok=True)
        # One thread: with more, DCP reports success though a writer failed (torch 2.15).
        dcp.save(state, storage_writer=dcp.FileSystemWriter(beside, thread_count=1))
        if self.world.is_main:
            self._publish(beside, final, {"step": step, **facts})
        self.world.barrier()
        return final

    def newest(self) -> int | None:
        """The step of the newest complete checkpoint, the same answer on every rank."""
        steps = _complete(self.directory) if self.world.is_main else {}
        return json.loads(self.world.broadcast_text(json.dumps(max(steps, default=None))))  # type: ignore[no-any-return]

    def load(self, step: int, state: dict[str, Any]) -> None:
        """Fill the tensors of `state` in place from the checkpoint of this step.

        Raises:
            ConfigError: the checkpoint belongs to another model or a newer torch.
        """
        path = self.directory / f"step-{step:08d}"
        manifest = json.loads((path / MANIFEST).read_text())
        try:
            dcp.load(state, storage_reader=dcp.FileSystemReader(path))
        except dcp.CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise ConfigError(
                f"{path} does not fit this run: {first}. It was written by torch "
                f"{manifest['torch']} (this is {torch.__version__}); is it the same model? "
                "Give this run another run.name to start afresh"
            ) from error

    def clean(self) -> None:
        """Remove what attempts that were killed while saving have left."""
        if self.world.is_main:
            for path in self.directory.glob(".*"):
                shutil.rmtree(path)
        self.world.barrier()

    def _publish(self, beside: Path, final: Path, facts: dict[str, Any]) -> None:
        manifest = {
            "format": FORMAT,
            "torch": torch.__version__,
            "world_size": self.world.world_size,
            **facts,
        }
        for path in beside.iterdir():  # up to torch 2.13 .metadata is synced before it is flushed
            sync(path)
        write_atomic(beside / MANIFEST, json.dumps(manifest) + "\n")
        if final.exists():  # the same step again, after a stop in the middle of publishing
            shutil.rmtree(final)
        beside.rename(final)
        sync(self.directory)
        self._retire()

    def _retire(self) -> None:
        complete = _complete(self.directory)
        for step in sorted(complete)[: -self.keep]:
            doomed = complete[step].rename(self.directory / f".retired-{step:08d}")
            shutil.rmtree(doomed)


def _complete(directory: Path) -> dict[int, Path]:
    found = {}
    if directory.exists():
        for path in directory.iterdir():
            match = re.fullmatch(r"step-(\d+)", path.name)
            if match and (path / MANIFEST).exists():
                found[int(match[1])] = path
    return found
