"""Export of weights to files that other programs read."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from rollcall.config import ConfigError
from rollcall.system.files import sync
from rollcall.train.checkpoint import layout, manifest
from rollcall.train.checkpoint.contents import Manifest, StoredTensor
from rollcall.train.checkpoint.read import nested, view, whole
from rollcall.train.ranks.device import buckets

# https://github.com/huggingface/safetensors#format
SAFETENSORS = {"bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
SAFETENSORS |= {f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)}
SAFETENSORS |= {f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)}
SAFETENSORS |= {f"float{bits}": f"F{bits}" for bits in (16, 32, 64)} | {"bfloat16": "BF16"}
SHARD_BYTES = 5_000_000_000
"""The largest safetensors file in a folder of Hugging Face, the limit of transformers too."""
COMPANIONS = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model",
    "chat_template*", "*processor_config.json", "generation_config.json",
)  # fmt: skip
"""Files beside the weights that belong to a model of transformers."""


def read(path: Path) -> dict[str, Any]:
    """Read and check a whole state, nested like the saved one; the errors are `manifest.read`'s."""
    with layout.reading(path):
        return nested(path, manifest.read(path))


class _Chosen(NamedTuple):
    path: Path
    stored: Manifest
    is_whole: bool  # with the state of the optimizer
    tensors: dict[str, StoredTensor]  # by their names in the export


def export(path: Path, target: Path, form: str, is_whole: bool = False) -> int:
    """Write the weights of a checkpoint in one of the FORMATS; return the number of tensors.

    If it `is_whole`, write everything that the checkpoint holds, under its full names. Raise
    Damaged, or ConfigError if the format cannot hold a tensor, or the checkpoint holds no weights.
    """
    with layout.reading(path):
        stored = manifest.read(path)
        tensors = stored.tensors if is_whole else stored.weights()
        if not tensors and not is_whole:
            raise ConfigError(f"{path} holds no tensor under model; --all exports all it holds")
        return FORMATS[form](_Chosen(path, stored, is_whole, tensors), target)


def _to_torch(chosen: _Chosen, target: Path) -> int:
    """Write values too, for torch.load(weights_only=True)."""
    with _new_file(target) as file:
        state = read(chosen.path)
        if not chosen.is_whole:
            state = state["model"] | (state["ema"] if chosen.stored.has_average else {})
        torch.save(state, file)
    return len(chosen.tensors)


def _to_hugging_face(chosen: _Chosen, target: Path) -> int:
    """Write a folder that `from_pretrained` loads: config.json and safetensors of at most 5 GB.

    Only one tensor is in memory at a time. The tokenizer's files are copied from the folder that
    the run started from, if it still exists.
    """
    path, stored, _, tensors = chosen
    config = stored.about("hugging_face")
    rules = stored.about("hugging_face_names")
    tensors = {renamed(name, rules): tensor for name, tensor in tensors.items()}
    if rules and config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    if "adapter" in stored.facts:
        raise ConfigError(f"{path} holds adapters; add --merge, or choose --format peft")
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
    with new_folder(target) as folder:
        shards = [*buckets(tensors.items(), SHARD_BYTES)]
        names = ["model.safetensors"]
        if len(shards) > 1:
            count = len(shards)
            names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
            total = sum(tensor.nbytes for tensor in tensors.values())
            files = zip(names, shards, strict=True)
            file_of = {name: file for file, shard in files for name in shard}
            index = {"metadata": {"total_size": total}, "weight_map": file_of}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        for name, shard in zip(names, shards, strict=True):
            _write_safetensors(path, folder / name, shard)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        keys = ("data", "args", "tokenizer"), ("model", "init"), ("model", "args", "base")
        sources = [stored.about("config", *section).get(key) for *section, key in keys]
        copy_companions(sources, folder)
    return len(tensors)


def _to_peft(chosen: _Chosen, target: Path) -> int:
    if not (config := chosen.stored.about("adapter")):
        raise ConfigError(f"{chosen.path} holds no adapters; set model.args.lora to train some")
    adapters = {
        f"base_model.model.{name.replace('.default', '')}": tensor
        for name, tensor in chosen.tensors.items()
        if ".lora_" in name
    }
    with new_folder(target) as folder:
        _write_safetensors(chosen.path, folder / "adapter_model.safetensors", adapters)
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return len(adapters)


FORMATS: dict[str, Callable[[_Chosen, Path], int]] = {
    "safetensors": lambda chosen, target: _write_safetensors(
        chosen.path, target, chosen.tensors, step=str(chosen.stored.step)
    ),
    "pt": _to_torch,
    "hf": _to_hugging_face,
    "peft": _to_peft,
}


def renamed(name: str, rules: Mapping[str, str]) -> str:
    """Return a name after all substitutions."""
    for pattern, replacement in rules.items():
        name = re.sub(pattern, replacement, name)
    return name


def copy_companions(sources: Iterable[Any], folder: Path) -> None:
    """Copy the files of a tokenizer from the folders that have them."""
    for source in (source for source in sources if isinstance(source, str) and source):
        for file in (file for name in COMPANIONS for file in Path(source).expanduser().glob(name)):
            if file.is_file() and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def _write_safetensors(
    path: Path, target: Path, chosen: dict[str, StoredTensor], **about: str
) -> int:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **about}}
    end = 0
    for name, tensor in chosen.items():
        if tensor.dtype not in SAFETENSORS:
            raise ConfigError(f"{name}: safetensors cannot hold {tensor.dtype}")
        start, end = end, end + tensor.nbytes
        kind = SAFETENSORS[tensor.dtype]
        header[name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": [start, end]}
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
        sync(beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Make a folder that gets its name once it is complete."""
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    beside.mkdir()
    try:
        yield beside
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
