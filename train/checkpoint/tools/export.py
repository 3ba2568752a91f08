"""How are weights exported? To files that other programs read."""

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp

from rollcall.config import ConfigError
from rollcall.train.checkpoint import layout, manifest
from rollcall.train.checkpoint.contents import Key, Manifest, StoredTensor
from rollcall.train.checkpoint.read import view, whole

SAFETENSORS = {  # https://github.com/huggingface/safetensors#format
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
SHARD_BYTES = 5_000_000_000
"""The most that a safetensors file in a folder of Hugging Face holds, as transformers does it."""
COMPANIONS = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "*processor_config.json",
    "generation_config.json",
)  # fmt: skip
"""Files beside the weights that belong to a model of transformers."""


def read(path: Path) -> dict[str, Any]:
    """Read and check a whole state, nested like the saved one; the errors are `manifest.read`'s."""
    state: dict[str, Any] = {}
    with layout.reading(path):
        stored = manifest.read(path)
        for tensor, numbers in whole(path, stored.tensors.values()):
            _put(state, tensor.key, numbers)
    for key, value in stored.values.values():
        _put(state, key, value)
    return state


class _Chosen(NamedTuple):
    """What is exported of a checkpoint."""

    path: Path
    stored: Manifest
    is_whole: bool  # the state of the optimizer too
    tensors: dict[str, StoredTensor]  # by their names in the export


def export(path: Path, target: Path, form: str, is_whole: bool = False) -> int:
    """Write the weights of a checkpoint in one of FORMATS, and return how many tensors.

    Args:
        is_whole: write everything that it holds, and do not leave out the first part of the names.

    Raises:
        Damaged: the checkpoint is damaged.
        ConfigError: the format cannot hold a tensor, or the checkpoint holds no weights.
    """
    with layout.reading(path):
        stored = manifest.read(path)
        tensors = stored.tensors if is_whole else stored.weights()
        if not tensors and not is_whole:
            raise ConfigError(
                f"{path} holds no tensor under model; --all exports everything it holds"
            )
        return FORMATS[form](_Chosen(path, stored, is_whole, tensors), target)


def _to_safetensors(chosen: _Chosen, target: Path) -> int:
    about = {"format": "pt", "step": str(chosen.stored.step)}
    return _write_safetensors(chosen.path, target, chosen.tensors, about)


def _to_torch(chosen: _Chosen, target: Path) -> int:
    """Write values too, for torch.load(weights_only=True)."""
    with _new_file(target) as file:
        state = read(chosen.path)
        if not chosen.is_whole:
            averages = state["ema"] if chosen.stored.has_average else {}
            state = {**state["model"], **averages}
        torch.save(state, file)
    return len(chosen.tensors)


def _to_hugging_face(chosen: _Chosen, target: Path) -> int:
    """Write a folder that `from_pretrained` loads: config.json and safetensors of at most 5 GB.

    Only one tensor is in memory at a time. Files of a tokenizer are copied from the folder that
    the run has started from, if it is still there.
    """
    path, stored, _, tensors = chosen
    config = stored.about("hugging_face")
    if "adapter" in stored.facts:
        raise ConfigError(f"{path} holds adapters; choose --format peft")
    if not config:
        raise ConfigError(
            f"{path} holds no model of transformers, so --format hf cannot write its "
            "config.json; choose a target that ends in .safetensors"
        )
    is_part = stored.about("config", "checkpoint").get("save_frozen") is False
    if is_part and stored.about("config", "model").get("freeze"):
        raise ConfigError(
            f"{path} holds only what was trained (checkpoint.save_frozen=false), and "
            "from_pretrained would draw the rest; choose a target that ends in .safetensors"
        )
    with _new_folder(target) as folder:
        shards = _shards(tensors)
        names = ["model.safetensors"]
        if len(shards) > 1:
            count = len(shards)
            names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
            total = sum(tensor.nbytes for tensor in tensors.values())
            files = zip(names, shards, strict=True)
            places = {name: file for file, shard in files for name in shard}
            index = {"metadata": {"total_size": total}, "weight_map": places}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        for name, shard in zip(names, shards, strict=True):
            _write_safetensors(path, folder / name, shard, {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        options = stored.about("config", "model")
        for place in (options.get("init"), stored.about("config", "model", "args").get("base")):
            _copy_companions(place, folder)
    return len(tensors)


def _to_peft(chosen: _Chosen, target: Path) -> int:
    """Write a folder of adapters that `PeftModel.from_pretrained` loads."""
    config = chosen.stored.about("adapter")
    if not config:
        raise ConfigError(f"{chosen.path} holds no adapters; set model.args.lora to train some")
    adapters = {
        f"base_model.model.{name.replace('.default', '')}": tensor
        for name, tensor in chosen.tensors.items()
        if ".lora_" in name
    }
    with _new_folder(target) as folder:
        file = folder / "adapter_model.safetensors"
        _write_safetensors(chosen.path, file, adapters, {"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return len(adapters)


def _to_dcp(chosen: _Chosen, target: Path) -> int:
    """Write a directory of torch.distributed.checkpoint; one tensor is in memory at a time."""
    with _new_folder(target) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it saves without other ranks
        state = {
            name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
            for name, tensor in chosen.tensors.items()
        }
        writer, planner = dcp.FileSystemWriter(folder), _Lazy(chosen)
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    return len(chosen.tensors)


FORMATS: dict[str, Callable[[_Chosen, Path], int]] = {
    "safetensors": _to_safetensors,
    "pt": _to_torch,
    "hf": _to_hugging_face,
    "peft": _to_peft,
    "dcp": _to_dcp,
}


class _Lazy(dcp.DefaultSavePlanner):
    """Reads each tensor when it is written."""

    def __init__(self, chosen: _Chosen) -> None:
        super().__init__()
        self._chosen = chosen

    def resolve_data(self, write_item: Any) -> Any:
        tensor = self._chosen.tensors[write_item.index.fqn]
        [(_, numbers)] = whole(self._chosen.path, [tensor])
        return numbers


def _shards(chosen: dict[str, StoredTensor]) -> list[dict[str, StoredTensor]]:
    shards: list[dict[str, StoredTensor]] = [{}]
    filled = 0
    for name, tensor in chosen.items():
        if shards[-1] and filled + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    return shards


def _copy_companions(place: Any, folder: Path) -> None:
    for pattern in COMPANIONS if isinstance(place, str) and place else ():
        for file in Path(place).expanduser().glob(pattern):
            if file.is_file() and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def _write_safetensors(
    path: Path, target: Path, chosen: dict[str, StoredTensor], about: dict[str, str]
) -> int:
    header: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, tensor in chosen.items():
        if tensor.dtype not in SAFETENSORS:
            raise ConfigError(f"{name}: safetensors cannot hold {tensor.dtype}")
        header[name] = {
            "dtype": SAFETENSORS[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data starts aligned
    with _new_file(target) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor, numbers in whole(path, chosen.values()):
            assert tensor.nbytes == numbers.nbytes
            file.write(view(numbers))
    return len(chosen)


@contextlib.contextmanager
def _new_file(target: Path) -> Iterator[IO[bytes]]:
    """Open a file that gets its name once it is complete and on disk."""
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Make a folder that gets its name once it is complete."""
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    beside.mkdir()
    try:
        yield beside
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _put(state: dict[str, Any], key: Key, value: Any) -> None:
    inner: Any = state
    for part in key[:-1]:
        inner = inner.setdefault(part, {})
    inner[key[-1]] = value
