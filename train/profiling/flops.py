"""Count the floating-point operations of a step, and compare them with what the chip can do."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from rollcall.config import chips
from rollcall.train.data.calling import arguments_of
from rollcall.train.data.source import Batch, Source
from rollcall.train.dist.device import chip_name
from rollcall.train.dist.run import Run

META = torch.device("meta")


class Operations(NamedTuple):
    """Floating-point operations; a multiplication and an addition are two."""

    forward: int
    backward: int
    recomputed: int  # of the forward pass again, by activation checkpointing

    @property
    def model(self) -> int:
        """Operations that the model needs, which define MFU, whatever is recomputed."""
        return self.forward + self.backward


def factors(run: Run, model: nn.Module, example: Batch, source: Source) -> dict[str, float]:
    """Return by what to multiply samples per second for further figures of metrics.jsonl.

    `tokens_per_second` for sequences; `flops_per_second`, the model's own operations on all ranks;
    `recomputed_flops_per_second`, if there are any. If the peak of the chip is known, `mfu`: the
    share of it that the model's own operations take, without recomputed ones; see Chowdhery et al.,
    PaLM, appendix B, https://arxiv.org/abs/2204.02311. The model must not be spread yet. Rank 0
    alone counts operations, because no other rank writes these figures.

    Raises:
        ConfigError: `log.chips` cannot be read.
    """
    config, world = run.config, run.world
    found = {}
    is_tensor = isinstance(example.inputs, torch.Tensor)
    if is_tensor and len(source.shape) == 1 and not example.inputs.is_floating_point():
        found["tokens_per_second"] = float(source.shape[0])
    peak = peak_of(chip_name(world.device), config.precision, config.log.chips)
    operations = operations_of(model, example) if world.is_main else None
    if operations is None or not operations.model:
        return found
    samples = len(example.weights)
    found["flops_per_second"] = operations.model / samples
    if operations.recomputed:
        found["recomputed_flops_per_second"] = operations.recomputed / samples
    if peak:
        found["mfu"] = operations.model / samples / peak / world.world_size
    return found


def operations_of(model: nn.Module, example: Batch) -> Operations | None:
    """Return the operations of a forward and a backward pass over these samples.

    They are counted on a copy of the model without values, so nothing is computed, and what the
    model keeps between calls does not change. Attention is counted as the plain formula. None if
    the model's code depends on values, or cannot be copied.
    """
    places, names = arguments_of(example.to(META))
    try:
        with counting() as counts:
            found = _without_values(model)(*places, **names)
            outputs = [
                one
                for one in tree_leaves(getattr(found, "logits", found))
                if isinstance(one, torch.Tensor) and one.requires_grad
            ]
            counts.is_backward = True
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
    except Exception:  # the model's code may raise anything
        return None
    return counts.found()


def _without_values(model: nn.Module) -> nn.Module:
    known: dict[int, Any] = {id(one): one.to(META) for one in model.buffers()}
    for one in model.parameters():
        known[id(one)] = nn.Parameter(one.detach().to(META), one.requires_grad)
    return copy.deepcopy(model, known)


@contextmanager
def counting() -> "Iterator[_Split]":
    """Count operations in the context; set `is_backward` between the two passes."""
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter, _Split(counter) as split:
        yield split


class _Split(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells apart what torch's counter counts in each pass.

    A backward pass runs without gradients, except for a forward pass that it recomputes.
    """

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter
        self._counts = [0, 0, 0]
        self.is_backward = False

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._counter.get_total_flops()
        result = func(*args, **(kwargs or {}))
        place = 0 if not self.is_backward else 2 if torch.is_grad_enabled() else 1
        self._counts[place] += self._counter.get_total_flops() - before
        return result

    def found(self) -> Operations:
        return Operations(*self._counts)


def peak_of(chip: str, precision: str, more: str | None = None) -> float | None:
    """Return the dense operations per second of a chip in a number format; None if unknown.

    Raise ConfigError if the file `more`, which adds to chips.yaml, cannot be used.
    """
    table = chips.known(more)
    name = chips.find(chip, table)
    return table[name].get(precision) if name else None
