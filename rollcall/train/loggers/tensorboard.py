"""Write the curves of a run for TensorBoard, into its directory."""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollcall.train.ranks.run import Run

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Writes event files; steps that are repeated replace the earlier ones."""

    def __init__(self, run: Run, directory: str = "tensorboard", flush_secs: int = 0) -> None:
        """Write into this directory of the run, every `flush_secs` seconds or, with 0, at once."""
        importlib.import_module("tensorboard")

        self._path = str(run.run_dir.path / directory)
        self._flush_secs = flush_secs
        self._writer: SummaryWriter | None = None
        self._last: dict[bool, int] = {}  # newest step of the training and of the validation

    def logged(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the values; names that begin with val_ are validation figures."""
        is_validation = any(name.startswith("val_") for name in values)
        if self._writer and step <= self._last.get(is_validation, -1):  # after a rollback
            self.close()
            self._writer = None
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._last.clear()
            flush_secs = self._flush_secs or 30
            # The validation after a step does not repeat that step of the training.
            first = step + is_validation
            self._writer = SummaryWriter(self._path, purge_step=first, flush_secs=flush_secs)
        self._last[is_validation] = step
        for name, value in values.items():
            tag = f"validation/{name[4:]}" if is_validation else f"training/{name}"
            self._writer.add_scalar(tag, value, step)
        if not self._flush_secs:  # a killed attempt would lose points before its checkpoint
            self._writer.flush()

    def close(self) -> None:
        """Write what is buffered."""
        if self._writer:
            self._writer.close()
