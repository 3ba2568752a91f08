"""The contents of a checkpoint: tensors in pieces, plain values, and facts. No torch."""

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
OBJECTS = "objects"
"""The part of a run's state with what objects of the user's return as `state_dict`."""


class Damaged(Exception):
    """A checkpoint is not what was written; the message names the file and the damage."""


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a tensor that one rank writes."""

    key: Key
    dtype: str
    whole: tuple[int, ...]  # shape of the tensor
    offset: tuple[int, ...]  # position of the first number in the tensor
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class Piece:
    """A rectangular part of a tensor, and the position of its bytes."""

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
        """Return the object under these nested names of the facts; {} for anything else."""
        fact: Any = self.facts
        for name in names:
            fact = fact.get(name) if isinstance(fact, dict) else None
        return fact if isinstance(fact, dict) else {}

    @property
    def has_average(self) -> bool:
        """True if the run evaluated the average of its weights, and the checkpoint holds it."""
        is_stored = any(tensor.key[0] == "ema" for tensor in self.tensors.values())
        return is_stored and bool(self.about("config", "optim").get("evaluate_ema"))

    def weights(self) -> dict[str, StoredTensor]:
        """Return the tensors that the evaluation used, by their names in the model."""
        weights: dict[str, StoredTensor] = {}
        for part in ("model", "ema") if self.has_average else ("model",):  # buffers have no average
            tensors = (tensor for tensor in self.tensors.values() if tensor.key[0] == part)
            weights |= {dotted(tensor.key[1:]): tensor for tensor in tensors}
        return weights

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(self.files.values())


def dotted(key: Key) -> str:
    """Return the dotted name of a key."""
    return ".".join(map(str, key))
