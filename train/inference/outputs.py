"""How are a model's outputs written? As a line for each sample, or as one array."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.utils.data import Dataset

from train.data.source import Batch
from train.inference.trained import Trained
from train.run import sync, write_atomic


class Format(Protocol):
    """One way to write outputs."""

    def encode(self, rows: range, outputs: torch.Tensor, batch: Batch) -> Sequence[Any]:
        """What is written for these samples; those without weight could not be read.

        Args:
            rows: their numbers, in the order of the batch; what else is in there is padding.
        """

    def write(self, path: Path, content: Sequence[Any]) -> None:
        """Write a part, whole."""

    def join(self, paths: Sequence[Path], beside: Path) -> None:
        """Write all parts into one file."""


class Lines:
    """JSON lines: sample, file, prediction and how sure the model is."""

    def __init__(self, model: Trained, dataset: Dataset[Any], has_targets: bool) -> None:
        self._names = model.source.names
        self._compares = model.config.train.loss == "mse"
        self._where = getattr(dataset, "where", None)
        self._has_targets = has_targets

    def encode(self, rows: range, outputs: torch.Tensor, batch: Batch) -> Sequence[Any]:
        """One object for each sample."""
        found = self._predictions(outputs, batch.targets)
        lines = []
        for place, row in enumerate(rows):
            line: dict[str, Any] = {"sample": row}
            if self._where:
                line["file"] = self._where(row)
            if batch.weights[place]:
                line.update({name: values[place] for name, values in found.items()})
                if self._names and "probability" in found:
                    line["class"] = self._names[line["prediction"]]
            else:
                line["error"] = "cannot be read"
            lines.append(json.dumps(line) + "\n")
        return lines

    def write(self, path: Path, content: Sequence[Any]) -> None:
        """Write a part, whole."""
        write_atomic(path, "".join(content))

    def join(self, paths: Sequence[Path], beside: Path) -> None:
        """One after the other."""
        with beside.open("wb") as file:
            for path in paths:
                file.write(path.read_bytes())

    def _predictions(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, list[Any]]:
        is_class = outputs.shape[:-1] == targets.shape and not targets.is_floating_point()
        if self._compares or not is_class:
            found = {"prediction": outputs.tolist()}
        elif targets.ndim == 1:
            probabilities, classes = outputs.softmax(-1).max(-1)
            found = {"prediction": classes.tolist(), "probability": probabilities.tolist()}
        else:  # every token has the one after it as its target, also in a file of the user's
            losses = functional.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none")
            found = {"prediction": outputs.argmax(-1).tolist()}
            return {**found, "loss": losses.flatten(1).mean(1).tolist()}
        return {**found, "target": targets.tolist()} if self._has_targets else found


class Array:
    """One array of all outputs, NaN for samples that could not be read."""

    def __init__(self, *_: object) -> None:
        """Nothing of the model or the data is needed."""

    def encode(self, rows: range, outputs: torch.Tensor, batch: Batch) -> Sequence[Any]:
        """A row for each sample."""
        outputs[batch.weights.cpu() == 0] = float("nan")
        return [*outputs[: len(rows)].numpy()]

    def write(self, path: Path, content: Sequence[Any]) -> None:
        """Write a part, whole."""
        beside = path.with_name(f".{path.name}.{os.getpid()}.npy")
        np.save(beside, np.stack(content))
        sync(beside)
        beside.replace(path)

    def join(self, paths: Sequence[Path], beside: Path) -> None:
        """Copy into a file that is mapped, so that it may be larger than the memory."""
        parts: list[NDArray[np.float32]] = [np.load(path, mmap_mode="r") for path in paths]
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        whole = np.lib.format.open_memmap(beside, "w+", parts[0].dtype, shape)
        start = 0
        for part in parts:
            whole[start : start + len(part)] = part
            start += len(part)
        whole.flush()


FORMATS: dict[str, Any] = {".jsonl": Lines, ".npy": Array}
