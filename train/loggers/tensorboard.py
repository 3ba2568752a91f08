"""Write the curves of a run for TensorBoard, into its directory."""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollcall.train.dist.run import Run

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Writes event files; a resumed run replaces the steps after its checkpoint."""

    def __init__(self, run: Run, directory: str = "tensorboard", flush_secs: int = 30) -> None:
        """Write into this directory of the run, at least every `flush_secs` seconds."""
        importlib.import_module("tensorboard")

        self._path = str(run.run_dir.path / directory)
        self._flush_secs = flush_secs
        self._writer: SummaryWriter | None = None

    def logged(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the values; names that begin with val_ are validation figures."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._path, purge_step=step, flush_secs=self._flush_secs)
        for name, value in values.items():
            is_validation = name.startswith("val_")
            tag = f"validation/{name[4:]}" if is_validation else f"training/{name}"
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Write what is buffered."""
        if self._writer:
            self._writer.close()
