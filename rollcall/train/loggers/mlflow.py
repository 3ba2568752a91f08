"""Log a run to MLflow; a requeued run continues as the same one."""

import importlib
import os
import time
from collections.abc import Mapping
from typing import Any

from rollcall.messages.text import dotted
from rollcall.train.loggers import Once
from rollcall.train.ranks.run import Run

TAG = "rollcall.run_directory"
"""The tag by which a run is found again."""


class MLflow:
    """Logs with the package mlflow, to MLFLOW_TRACKING_URI or a database in the run's directory."""

    def __init__(self, run: Run, experiment: str = "rollcall", tracking_uri: str = "") -> None:
        tracking: Any = importlib.import_module("mlflow.tracking")
        self._metric: Any = importlib.import_module("mlflow.entities").Metric
        self._once = Once(run)
        path = run.run_dir.path.absolute()
        database = f"sqlite:///{path}/mlflow.db"  # newer versions refuse a directory
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or database
        self._client = tracking.MlflowClient(uri)
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self._client.create_experiment(experiment)
        if runs := self._client.search_runs([number], f"tags.`{TAG}` = '{path}'"):
            self._id = runs[0].info.run_id
            self._client.set_terminated(self._id, "RUNNING")
            return
        tags = {TAG: str(path)}
        self._id = self._client.create_run(number, tags=tags, run_name=run.run_dir.name).info.run_id
        for key, value in dotted(run.config.model_dump()).items():
            self._client.log_param(self._id, key, str(value)[:500])

    def logged(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the values of a step that are new: MLflow keeps every point."""
        now, new = int(time.time() * 1000), self._once.new(step, values)
        points = [self._metric(name, float(value), now, step) for name, value in new.items()]
        self._client.log_batch(self._id, points)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)
