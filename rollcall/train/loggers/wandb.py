"""Log a run to Weights & Biases, also offline; a requeued run continues as the same one."""

import hashlib
import importlib
from collections.abc import Mapping
from typing import Any

from rollcall.train.loggers import Once
from rollcall.train.ranks.run import Run


class Wandb:
    """Logs with the package wandb; WANDB_MODE=offline writes files alone."""

    def __init__(self, run: Run, project: str = "rollcall", entity: str | None = None) -> None:
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
        self._once = Once(run)

    def logged(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the values of a step that are new: files of several attempts are put together."""
        if new := self._once.new(step, values):
            self._run.log(new, step=step)

    def close(self) -> None:
        """Write what is buffered."""
        self._run.finish()
