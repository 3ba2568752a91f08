"""Weights that other programs and earlier runs have stored; a rank reads only what it needs.

Formats: safetensors, https://github.com/huggingface/safetensors#format; torch.save; a checkpoint of
a run. No code from a file is run.
"""

import json
import math
import mmap
import pickle
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from rollcall.config import ConfigError
from rollcall.config.checks import WEIGHTS
from rollcall.records.run_dir import named
from rollcall.train.checkpoint import layout, manifest, scores
from rollcall.train.checkpoint.contents import Damaged
from rollcall.train.checkpoint.read import load, slices
from rollcall.train.checkpoint.tools.export import SAFETENSORS
from rollcall.train.checkpoint.write_plan import chunks

DTYPES = {code: getattr(torch, name) for name, code in SAFETENSORS.items()}
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = "model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin"
NESTED = ("model", "state_dict", "model_state_dict", "module")
"""Names under which training scripts save the weights beside other things."""
MAX_HEADER = 100_000_000
"""Bytes of the header of a safetensors file, the limit of safetensors' own reader too."""


class Mapped:
    """Whole tensors in memory that is mapped from files, so that only used parts are read."""

    def __init__(self, where: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.where = where
        self._tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def fill(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """Copy the parts that the tensors hold."""
        for name, target in wanted.items():
            values = self._tensors[name]
            if _kind(values) != _kind(target):
                raise ConfigError(
                    f"model.init={self.where}: {name} is stored as {values.dtype}, but the model "
                    f"has {target.dtype}; convert it, or set model.init_random={name}"
                )
            copy_parts(values, target)


class CheckpointWeights:
    """The weights in a checkpoint of a run: their average if the run evaluated that."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stored = manifest.read_named(path)
        self.where = f"{path} (its average)" if self._stored.has_average else str(path)
        self._weights = self._stored.weights()
        self.shapes = {name: tensor.shape for name, tensor in self._weights.items()}

    def fill(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """Read the pieces that this rank needs, and check them."""
        state: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in wanted.items():
            state.setdefault(str(self._weights[name].key[0]), {})[name] = tensor
        with layout.reading(self._path), manifest.naming(self._path):
            load(self._path, self._stored, state)


Stored = Mapped | CheckpointWeights
"""Weights in files. `where` names them in messages, `shapes` has the shapes of the tensors by name,
and `fill` fills tensors of the same shapes; of a DTensor only this rank's part."""


def _kind(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def copy_parts(values: torch.Tensor, target: torch.Tensor) -> None:
    """Copy values of the whole shape into a tensor, or this rank's part into a DTensor."""
    for chunk, part in chunks({"": target})[0]:
        part.copy_(values[slices(chunk.offset, chunk.shape)])


def open_(text: str) -> Stored:
    """Open the file, folder or run that `model.init` names; ConfigError if it cannot be read."""
    path = Path(text).expanduser()
    try:
        if path.is_file():
            return _file(path)
        if path.is_dir() and (weights := _folder(path)):
            return weights
        if run := named(text, "checkpoints"):
            return _run(run)
        reason = "this folder holds no weights" if path.is_dir() else "no such file, folder or run"
        raise ConfigError(f"model.init={text}: {reason}; expected {WEIGHTS}")
    except ConfigError:
        raise
    except (OSError, RuntimeError, Damaged, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0]
        if reason.startswith("Weights only"):  # torch goes on to advise unpickling it all the same
            code = re.search(r"GLOBAL (\S+)", str(error))
            reason = "it is a pickle of more than tensors" + (f", with {code[1]}" if code else "")
        raise ConfigError(f"model.init={text}: the weights cannot be read: {reason}") from error


def _file(path: Path) -> Stored:
    if path.suffix == ".safetensors":
        return Mapped(str(path), _safetensors(path))
    if path.suffix in (".pt", ".pth", ".bin"):
        return Mapped(str(path), _torch_save(path))
    raise ConfigError(f"model.init={path}: unknown kind of file; expected {WEIGHTS}")


def _folder(path: Path) -> Stored | None:
    if (path / ".metadata").is_file():
        raise ConfigError(
            f"model.init={path}: a folder of torch.distributed.checkpoint; make one file of it: "
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} weights.pt"
        )
    if (path / manifest.NAME).is_file():
        return CheckpointWeights(path)
    for index in (path / name for name in INDEXES):
        if index.is_file():
            shards = json.loads(index.read_text())["weight_map"]
            read = _safetensors if ".safetensors" in index.name else _torch_save
            files = {file: read(path / Path(file).name) for file in sorted(set(shards.values()))}
            return Mapped(str(path), {name: files[file][name] for name, file in shards.items()})
    single = next((path / name for name in SINGLE if (path / name).is_file()), None)
    return _file(single) if single else None


def _run(run: Path) -> Stored:
    """Open the best checkpoint of a run, or the newest if none was evaluated."""
    if not (published := layout.published(run / "checkpoints")):
        raise ConfigError(f"model.init={run}: this run has no checkpoint yet")
    try:
        step = scores.best(run / "checkpoints")
    except ConfigError:
        step = max(published)
    return CheckpointWeights(published[step])


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER:
            raise ValueError("it is not a safetensors file")
        header = json.loads(file.read(length))
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    header.pop("__metadata__", None)
    return {name: _mapped(data, 8 + length, **about) for name, about in header.items()}


def _mapped(
    data: mmap.mmap, start: int, dtype: str, shape: list[int], data_offsets: list[int]
) -> torch.Tensor:
    if dtype not in DTYPES:
        raise ValueError(f"it holds numbers of the unknown type {dtype}")
    kind, count = DTYPES[dtype], math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=kind)
    tensor = torch.frombuffer(data, dtype=kind, count=count, offset=start + data_offsets[0])
    return tensor.view(shape)


def _torch_save(path: Path) -> dict[str, torch.Tensor]:
    read = partial(torch.load, path, map_location="cpu", weights_only=True)
    try:
        state = read(mmap=True)
    except (RuntimeError, ValueError):  # the format before torch 1.6 cannot be mapped
        state = read()
    while isinstance(state, dict) and not any(isinstance(v, torch.Tensor) for v in state.values()):
        inner = next((name for name in NESTED if isinstance(state.get(name), dict)), None)
        if inner is None:
            raise ValueError(f"it holds no tensors by name, only {', '.join(map(str, state))[:80]}")
        state = state[inner]
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__} instead of a state dict")
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
