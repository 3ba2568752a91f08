"""Exact mode: the same bits for any number of ranks.

Floating-point sums depend on their order. So the global batch is cut into a fixed number of virtual
shards, each computed by itself, and their gradients are added by one fixed binary tree: a rank adds
those of its own shards, then ranks exchange sums with the rank whose number differs in one bit.
a + b and b + a are the same bits, so every rank ends with the same sum.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from train.config import Config, ConfigError
from train.data.source import Batch
from train.parallel import virtual
from train.parallel.part import size
from train.parallel.strategy import Composed, PerSampleLoss
from train.precision import autocast
from train.randomness import set_seed
from train.world import World

if TYPE_CHECKING:
    from train.proof.trace import Recorder


class Exact(Composed):
    """Replicas whose weights do not depend on how many of them there are.

    Attributes:
        recorder: what writes down the fingerprints of every step, if anything does.
    """

    def __init__(self, config: Config, world: World, loss: PerSampleLoss) -> None:
        """Take this rank's shards, and let torch compute deterministically from here on.

        Raises:
            ConfigError: this number of ranks cannot share the shards equally.
        """
        try:
            virtual.check_ranks(world.world_size, config.exact_shards)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        super().__init__(config, world, loss)
        self._count = config.exact_shards
        self._own = virtual.own(world.rank, world.world_size, config.exact_shards)
        self.stream = 0  # randomness belongs to the virtual shards, not to the ranks
        self.recorder: Recorder | None = None
        be_deterministic()

    @property
    def shares(self) -> tuple[range, int]:
        """The virtual shards of this rank, and how many there are."""
        return self._own, self._count

    def rows(self, batch: int) -> range:
        """The rows of this rank's shards, equally many in each; the last may be padding."""
        share = math.ceil(batch / self._count)
        return range(self._own.start * share, self._own.stop * share)

    def place(self, model: nn.Module, example: Batch) -> None:
        """Take the model to the device, with the weights of rank 0.

        Raises:
            ConfigError: its BatchNorm layers would keep statistics that depend on the ranks.
        """
        name = next((n for n, part in model.named_modules() if isinstance(part, _BatchNorm)), None)
        if name is not None:
            raise ConfigError(
                f"exact=true cannot keep layer {name} of the model equal for every number of "
                "ranks: BatchNorm gathers statistics of what a rank sees. Use GroupNorm or "
                "LayerNorm in its place, or leave exact=true out"
            )
        super().place(model, example)
        for tensor in self._model.state_dict().values():
            dist.broadcast(tensor, 0)

    def describe(self) -> str:
        """What every rank holds, and the tree."""
        rounds = len(self._peers())
        gradients = size(sum(weight.nbytes for weight in self._model.parameters()))
        exchanges = f"; per step {rounds} exchanges of {gradients} of gradients" * bool(rounds)
        return (
            f"{super().describe()} Exact: {len(self._own)} of {self._count} virtual shards of the "
            f"batch on each rank, added by a fixed tree{exchanges}."
        )

    def forward_backward(self, micro_batches: Sequence[Batch], count: int) -> torch.Tensor:
        """Leave the gradient of the mean loss over `count` samples, added shard by shard."""
        step_seed = torch.initial_seed()
        parameters = [weight for weight in self._model.parameters() if weight.requires_grad]
        shards = list(self._shards(micro_batches))
        losses: list[torch.Tensor] = []
        tree = Tree()
        for number, shard in zip(self._own, shards, strict=True):
            set_seed(step_seed, "shard", number)
            with self._around(last=number == self._own[-1]):
                with autocast(self._precision, self.world.device):
                    outputs = self._callable(shard.inputs)
                loss = self._sum_of_losses(outputs, shard)
                (loss / count).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            tree.add(_flatten([loss.detach(), *_take_gradients(parameters)]))
        total, *gradients = _unflatten(
            self._exchange(tree.sum()), [losses[0], *(weight.data for weight in parameters)]
        )
        for weight, gradient in zip(parameters, gradients, strict=True):
            weight.grad = gradient
        if self.recorder:
            self.recorder.step(self._model, shards, losses)
        # The sum over all ranks follows, and zeros change no bit of it.
        return total * (self.world.rank == 0)

    def rejoin(self) -> bool:
        """Not here: the pieces of a batch are part of the result.

        Raises:
            MemoryError: always.
        """
        raise MemoryError(
            f"a virtual shard of exact mode does not fit into the memory of rank {self.world.rank}:"
            " raise exact_shards, which changes the result, or take a smaller model"
        )

    def add(self, terms: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of the terms of all shards, by the same tree."""
        tree = Tree()
        for term in terms:
            tree.add([term])
        return self._exchange(tree.sum())[0]

    def _shards(self, micro_batches: Sequence[Batch]) -> Iterator[Batch]:
        whole = [torch.cat(tensors) for tensors in zip(*micro_batches, strict=True)]
        for parts in zip(*(tensor.chunk(len(self._own)) for tensor in whole), strict=True):
            # A copy begins where any allocation does. A view may not, and a kernel that works on
            # aligned blocks would add its first numbers in another order.
            yield Batch(*(part.clone() for part in parts))

    def _peers(self) -> list[int]:
        rounds = self.world.world_size.bit_length() - 1
        return [self.world.rank ^ (1 << bit) for bit in range(rounds)]

    def _exchange(self, vectors: list[torch.Tensor]) -> list[torch.Tensor]:
        for peer in self._peers():
            theirs = [torch.empty_like(vector) for vector in vectors]
            transfers = [dist.P2POp(dist.isend, vector, peer) for vector in vectors]
            transfers += [dist.P2POp(dist.irecv, vector, peer) for vector in theirs]
            for work in dist.batch_isend_irecv(transfers):
                work.wait()
            vectors = [mine + other for mine, other in zip(vectors, theirs, strict=True)]
        return vectors


class Tree:
    """Adds lists of tensors as they come, as a binary tree over a power of two of them would."""

    def __init__(self) -> None:
        self._sums: list[tuple[int, list[torch.Tensor]]] = []  # (terms, their sum), fewest last

    def add(self, term: list[torch.Tensor]) -> None:
        """One more leaf; sums of equally many leaves are joined."""
        leaves = 1
        while self._sums and self._sums[-1][0] == leaves:
            _, before = self._sums.pop()
            term = [a + b for a, b in zip(before, term, strict=True)]
            leaves *= 2
        self._sums.append((leaves, term))

    def sum(self) -> list[torch.Tensor]:
        """The root."""
        ((_, root),) = self._sums
        return root


def be_deterministic() -> None:
    """Let torch use only what gives the same bits on the same kind of device.

    One thread on the CPU: with several, a sum is cut into as many parts.
    """
    torch.set_num_threads(1)
    # cuBLAS reads this when it first multiplies: https://docs.nvidia.com/cuda/cublas/
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def _take_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[torch.Tensor]:
    """The gradient of each, zeros for one that a shard did not use; they are left without."""
    for weight in parameters:
        yield torch.zeros_like(weight) if weight.grad is None else weight.grad
        weight.grad = None


def _flatten(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """One vector for each number format."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
    return [torch.cat(group) for group in groups.values()]


def _unflatten(
    vectors: Iterable[torch.Tensor], like: Iterable[torch.Tensor]
) -> Iterator[torch.Tensor]:
    rest = {vector.dtype: vector for vector in vectors}
    for tensor in like:
        part, rest[tensor.dtype] = rest[tensor.dtype].tensor_split([tensor.numel()])
        yield part.view(tensor.shape)
