"""Seeds, derived from the run's seed and the purpose, and a stream for each piece of activations.

No random state is saved: a resumed run derives the same seeds at a step as an uninterrupted one.
Seeds follow what a rank holds. `set_seed` starts a stream that is the same on all ranks which
compute the same activations. Where a rank holds a piece of them, a `Fork` gives the piece its
own numbers, like the CUDA RNG tracker of Megatron-LM, https://arxiv.org/abs/1909.08053.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, *purpose: str | int) -> int:
    """Return a seed of 63 bits, independent for every purpose, such as ("dropout", rank, step)."""
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def set_seed(seed: int, *purpose: str | int, gpus: bool = True) -> None:
    """Seed the generators of torch (CPU and, with `gpus`, GPU), Python and NumPy for a purpose."""
    derived = derive(seed, *purpose)
    # torch.manual_seed formats a stack for every kind of device that is not initialized: 200 µs.
    torch.default_generator.manual_seed(derived)
    random.seed(derived)
    np.random.seed(derived % 2**32)
    if gpus and torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # since the world was joined
        torch.cuda.manual_seed_all(derived)


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Restore the state of all generators at the end of the context."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def next_numbers() -> list[float]:
    """Return the next random number of Python, NumPy and torch (CPU), without drawing it."""
    with kept(torch.device("cpu")):
        return [random.random(), np.random.random(), float(torch.rand(()))]


class Fork:
    """Random numbers of torch for this rank's piece of activations that are cut over ranks.

    The piece's seed is drawn from the common stream, which continues afterwards as if there were no
    fork. So the state of the common stream determines both, and a forward pass that is repeated
    from a saved state (activation checkpointing) draws the same numbers again.
    """

    def __init__(self, device_type: str, name: str, piece: int) -> None:
        """Create the stream of one piece, on the current device of this type."""
        self._device_type = device_type
        self._purpose = name, piece
        self._seed: int | None = None
        self._common: torch.Tensor

    def enter(self) -> None:
        """Draw from the piece's stream from now on; nothing changes if that is so already."""
        generator = self._generator()
        # The generator's seed shows whose stream it draws from, also after an exception, or if
        # something else has set its state.
        if generator.initial_seed() == self._seed:
            return
        drawn = int(torch.randint(1 << 62, ()))  # on the CPU, so that no GPU is waited for
        self._common = generator.get_state()
        # A fork around this one may have given the GPU's generator a stream of its own.
        self._seed = derive(drawn, generator.initial_seed(), *self._purpose)
        generator.manual_seed(self._seed)

    def leave(self) -> None:
        """Draw from the common stream again."""
        generator = self._generator()
        if generator.initial_seed() == self._seed:
            generator.set_state(self._common)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Draw from the piece's stream inside the context."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def _generator(self) -> torch.Generator:
        if self._device_type == "cuda":
            generator: torch.Generator = torch.cuda.default_generators[torch.cuda.current_device()]
            return generator
        return torch.default_generator
