"""Write the curves of a run for TensorBoard, into its directory."""

import importlib
from collections.abc import Mapping
from typing import Any

from rollcall.train.loggers import Once
from rollcall.train.ranks.run import Run


class TensorBoard:
    """Writes event files; those of several attempts make up one run."""

    def __init__(self, run: Run, directory: str = "tensorboard", flush_secs: int = 0) -> None:
        """Write into this directory of the run, every `flush_secs` seconds or, with 0, at once."""
        importlib.import_module("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._once, self._flushes = Once(run), not flush_secs
        path = str(run.run_dir.path / directory)
        self._writer: Any = SummaryWriter(path, flush_secs=flush_secs or 30)

    def logged(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the values that are new; names that begin with val_ are validation figures."""
        for name, value in self._once.new(step, values).items():
            tag = f"validation/{name[4:]}" if name.startswith("val_") else f"training/{name}"
            self._writer.add_scalar(tag, value, step)
        if self._flushes:  # a killed attempt would lose points
            self._writer.flush()

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()
