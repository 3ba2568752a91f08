"""Formats of predictions: a JSON line for each sample, or one NumPy array."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from rollcall.records.files import write_atomic
from rollcall.train.data.source import Batch
from rollcall.train.inference.trained import Trained
from rollcall.train.numerics import losses


class _JsonLines:
    """JSON lines with sample, file, prediction and probability or loss."""

    def __init__(self, model: Trained, dataset: Dataset[Any], has_targets: bool) -> None:
        self._names = model.source.names
        self._loss = losses.of(model.config)
        self._where = getattr(dataset, "where", None)
        self._has_targets = has_targets

    def encode(self, indices: range, outputs: torch.Tensor, batch: Batch) -> Sequence[Any]:
        found = self._predictions(outputs, batch.targets)
        lines = []  # the rows after those with an index are padding
        for row, index in enumerate(indices):
            line: dict[str, Any] = {"sample": index}
            if self._where:
                line["file"] = self._where(index)
            if batch.weights[row]:
                line.update({name: values[row] for name, values in found.items()})
                if self._names and "probability" in found:
                    line["class"] = self._names[line["prediction"]]
            else:
                line["error"] = "cannot be read"
            lines.append(json.dumps(line) + "\n")
        return lines

    def write(self, path: Path, content: Sequence[Any]) -> None:
        write_atomic(path, "".join(content))

    def join(self, paths: Sequence[Path], target: Path) -> None:
        with target.open("wb") as file:
            file.writelines(path.read_bytes() for path in paths)

    def _predictions(self, outputs: torch.Tensor, targets: torch.Tensor) -> Mapping[str, list[Any]]:
        is_class = outputs.shape[:-1] == targets.shape and not targets.is_floating_point()
        if self._loss.is_of_values or not is_class:
            found = {"prediction": outputs.tolist()}
        elif targets.ndim == 1:
            probabilities, classes = outputs.softmax(-1).max(-1)
            found = {"prediction": classes.tolist(), "probability": probabilities.tolist()}
        else:  # the target of every token is the next one, also in a user's file
            sums, weights = self._loss(outputs, targets)
            means = [(a / b).item() if b else None for a, b in zip(sums, weights, strict=True)]
            return {"prediction": outputs.argmax(-1).tolist(), "loss": means}
        return {**found, "target": targets.tolist()} if self._has_targets else found


class _NumpyArray:
    """One array of all outputs; NaN for unreadable samples."""

    def __init__(self, *_: object) -> None: ...

    def encode(self, indices: range, outputs: torch.Tensor, batch: Batch) -> Sequence[Any]:
        outputs[batch.weights.cpu() == 0] = float("nan")
        return [*outputs[: len(indices)].numpy()]

    def write(self, path: Path, content: Sequence[Any]) -> None:
        data = io.BytesIO()
        np.save(data, np.stack(content))
        write_atomic(path, data.getvalue())

    def join(self, paths: Sequence[Path], target: Path) -> None:
        """Copy into a memory-mapped file, which may be larger than the memory."""
        parts: list[NDArray[np.float32]] = [np.load(path, mmap_mode="r") for path in paths]
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        whole = np.lib.format.open_memmap(target, "w+", parts[0].dtype, shape)
        start = 0
        for part in parts:
            whole[start : start + len(part)] = part
            start += len(part)
        whole.flush()


Format = _JsonLines | _NumpyArray
FORMATS: dict[str, Any] = {".jsonl": _JsonLines, ".npy": _NumpyArray}
