"""The Python standard library's own source as bytes: real text, on every machine."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

from train.data.source import Batch, Source
from train.schema import ConfigError, Data
from train.world import World

HELD_OUT = 50


def text(config: Data, _world: World) -> Source:
    """Samples of `context` bytes, each with the byte that follows as target; every 50th validates.

    Raises:
        ConfigError: this Python comes without the sources of its library.
    """
    library = Path(sysconfig.get_path("stdlib"))
    corpus = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    count = (len(corpus) - 1) // config.context
    if count < HELD_OUT:
        raise ConfigError(
            f"data.name=text: {library} holds {len(corpus)} bytes of Python sources, which is less "
            f"than {HELD_OUT} samples of data.context={config.context}: take a smaller one"
        )
    stream = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
    held_out = torch.arange(count) % HELD_OUT == HELD_OUT - 1
    starts = torch.arange(count) * config.context
    train, validation = starts[~held_out], starts[held_out]
    return Source(
        train=Windows(stream, train, config.context),
        validation=Windows(stream, validation, config.context),
        train_size=len(train),
        validation_size=len(validation),
        shape=(config.context,),
        classes=256,
    )


class Windows(Dataset[Batch]):
    """Equally long pieces of one stream of tokens."""

    def __init__(self, stream: torch.Tensor, starts: torch.Tensor, context: int) -> None:
        self.stream = stream
        self.starts = starts
        self.context = context

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> Batch:
        return self.__getitems__([row])

    def __getitems__(self, rows: list[int]) -> Batch:
        """The rows as one batch; torch's DataLoader calls this for a whole batch."""
        places = self.starts[torch.tensor(rows)].unsqueeze(1) + torch.arange(self.context + 1)
        tokens = self.stream[places].long()
        return Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(len(rows)))
