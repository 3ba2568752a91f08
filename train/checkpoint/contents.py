"""What does a checkpoint hold? Tensors in pieces, plain values, and facts. No torch."""

import math
from dataclasses import dataclass
from typing import Any

ITEM_SIZES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of one number of each type that a checkpoint can hold."""
Key = tuple[str | int, ...]
"""The path to a value in the nested state, such as ("model", "weight")."""


class Damaged(Exception):
    """A checkpoint is not what was written; the message names the file and what is wrong."""


@dataclass(frozen=True)
class Piece:
    """A rectangular part of a tensor, and where its bytes are."""

    offset: tuple[int, ...]  # of its first number in the tensor
    shape: tuple[int, ...]
    file: str
    start: int  # position of its first byte in the file
    crc32: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint; its pieces cover it, or one node's part of it."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def name(self) -> str:
        """The dotted name, such as model.weight."""
        return dotted(self.key)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its pieces together."""
        return sum(map(self.size, self.pieces))

    def size(self, piece: Piece) -> int:
        """Bytes of one piece."""
        return math.prod(piece.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """Everything a checkpoint says about itself."""

    files: dict[str, int]  # bytes of each
    tensors: dict[str, StoredTensor]  # by dotted name
    values: dict[str, tuple[Key, Any]]  # numbers, texts and lists of them, by dotted name
    facts: dict[str, Any]  # step, time, torch, world_size, and those given to the save

    @property
    def step(self) -> int:
        """Number of updates that the state contains."""
        return int(self.facts["step"])

    def about(self, *names: str) -> dict[str, Any]:
        """Return the object at this place in the facts; an empty one if there is something else."""
        found: Any = self.facts
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    @property
    def has_average(self) -> bool:
        """Whether the evaluation of the run used the average of the weights, and it is here."""
        has_some = any(tensor.key[0] == "ema" for tensor in self.tensors.values())
        return has_some and bool(self.about("config", "optim").get("evaluate_ema"))

    def weights(self) -> dict[str, StoredTensor]:
        """Return the tensors that the evaluation used, by their names in the model."""
        parts = ("model", "ema") if self.has_average else ("model",)  # buffers have no average
        tensors = self.tensors.values()
        return {dotted(one.key[1:]): one for part in parts for one in tensors if one.key[0] == part}

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(self.files.values())


def dotted(key: Key) -> str:
    """Return the dotted name of a key."""
    return ".".join(map(str, key))
