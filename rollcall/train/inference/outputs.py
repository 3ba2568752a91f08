"""The lines of predictions: one for each sample."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

from rollcall.train.data.source import Batch
from rollcall.train.inference.trained import Trained
from rollcall.train.numerics import losses
from rollcall.train.numerics.cross_entropy import IGNORED


class Lines:
    """JSON lines with the sample's number, its file, the prediction, and a probability or loss."""

    def __init__(self, model: Trained, dataset: Dataset[Any], has_targets: bool) -> None:
        self._names = model.source.names
        self._loss = model.strategy.loss
        self._where = getattr(dataset, "where", None)
        self._has_targets = has_targets

    def encode(
        self, indices: range, outputs: torch.Tensor, batch: Batch, filled: torch.Tensor | None
    ) -> list[str]:
        """Return a line for each index; `filled` is a mask (rows, length) of the rows' content."""
        columns = self._predictions(outputs, batch.targets)
        lengths = _lengths(outputs, batch.targets, filled)
        lines = []  # the rows without an index are padding
        for row, index in enumerate(indices):
            line: dict[str, Any] = {"sample": index}
            if self._where:
                line["file"] = self._where(index)
            if batch.weights[row]:
                line.update({name: values[row] for name, values in columns.items()})
                for name in {"prediction", "target"} & line.keys() if lengths else ():
                    line[name] = line[name][: lengths[row]]
                if self._names and "probability" in columns:
                    line["class"] = self._names[line["prediction"]]
            else:
                line["error"] = "cannot be read"
            lines.append(json.dumps(line) + "\n")
        return lines

    def _predictions(self, outputs: torch.Tensor, targets: Any) -> Mapping[str, list[Any]]:
        if self._loss.is_of_values or not losses.are_scores(outputs, targets):
            values = torch.view_as_real(outputs) if outputs.is_complex() else outputs
            columns = {"prediction": values.tolist()}
        elif targets.ndim == 1:
            probabilities, classes = outputs.softmax(-1).max(-1)
            columns = {"prediction": classes.tolist(), "probability": probabilities.tolist()}
        else:  # the target of every token is the next one, also in a user's file
            sums, weights = self._loss(outputs, targets)
            means = [(a / b).item() if b else None for a, b in zip(sums, weights, strict=True)]
            return {"prediction": outputs.argmax(-1).tolist(), "loss": means}
        if self._has_targets and isinstance(targets, torch.Tensor):  # not several, or none
            columns["target"] = targets.tolist()
        return columns


def _lengths(outputs: torch.Tensor, targets: Any, filled: torch.Tensor | None) -> list[int]:
    """Return the number of outputs of each row without padding; [] if outputs are not rows."""
    if filled is None or not isinstance(targets, torch.Tensor):
        return []
    if not outputs.shape[:2] == targets.shape[:2] == filled.shape:
        return []
    padding = targets[~filled.cpu()]  # targets that only happen to be as long have other values
    is_padded = (padding == (0 if targets.is_floating_point() else IGNORED)).all()
    return filled.sum(1).tolist() if is_padded else []
