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

from rollcall.config import ConfigError
from rollcall.system.files import write_atomic
from rollcall.train.data.source import Batch
from rollcall.train.inference.trained import Trained
from rollcall.train.numerics import losses
from rollcall.train.numerics.cross_entropy import IGNORED


class _JsonLines:
    """JSON lines with the sample's number, its file, the prediction, and a probability or loss."""

    def __init__(self, model: Trained, dataset: Dataset[Any], has_targets: bool) -> None:
        self._names = model.source.names
        self._loss = model.strategy.loss
        self._where = getattr(dataset, "where", None)
        self._has_targets = has_targets

    def encode(
        self, indices: range, outputs: torch.Tensor, batch: Batch, filled: torch.Tensor | None
    ) -> Sequence[Any]:
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

    def write(self, path: Path, content: Sequence[Any]) -> None:
        write_atomic(path, "".join(content))

    def join(self, paths: Sequence[Path], target: Path) -> None:
        with target.open("wb") as file:
            file.writelines(path.read_bytes() for path in paths)

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


class _NumpyArray:
    """One array of all outputs; NaN for unreadable samples."""

    def __init__(self, *_: object) -> None: ...

    def encode(
        self, indices: range, outputs: torch.Tensor, batch: Batch, _filled: torch.Tensor | None
    ) -> Sequence[Any]:
        outputs = outputs if outputs.is_complex() else outputs.float()
        outputs[batch.weights.cpu() == 0] = float("nan")
        return [*outputs[: len(indices)].numpy()]

    def write(self, path: Path, content: Sequence[Any]) -> None:
        _check_shapes({row.shape for row in content})
        data = io.BytesIO()
        np.save(data, np.stack(content))
        write_atomic(path, data.getvalue())

    def join(self, paths: Sequence[Path], target: Path) -> None:
        """Copy into a memory-mapped file, which may be larger than the memory."""
        parts: list[NDArray[np.float32]] = [np.load(path, mmap_mode="r") for path in paths]
        _check_shapes({part.shape[1:] for part in parts})
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        whole = np.lib.format.open_memmap(target, "w+", parts[0].dtype, shape)
        start = 0
        for part in parts:
            whole[start : start + len(part)] = part
            start += len(part)
        whole.flush()


def _check_shapes(shapes: set[tuple[int, ...]]) -> None:
    """Raise ConfigError if the outputs of samples differ in their shapes."""
    if len(shapes) > 1:
        first, second, *_ = sorted(shapes)
        raise ConfigError(
            f"--output: one array cannot hold outputs of the shapes {first} and {second}; set "
            "data.pad to the length of the longest row, or choose a .jsonl file"
        )


Format = _JsonLines | _NumpyArray
OUTPUT_FORMATS: dict[str, Any] = {".jsonl": _JsonLines, ".npy": _NumpyArray}
