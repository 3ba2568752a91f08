"""Exact mode: train to the same bits on any number of ranks.

A floating-point sum depends on the order of its terms. So a fixed number of virtual shards are
computed separately, and their gradients are summed along one fixed binary tree: each rank sums its
own shards, then exchanges sums with the rank whose number differs in the lowest bit, then in the
next one, and so on. a + b and b + a have the same bits, so all ranks end with the same sum.
"""

import math
import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from rollcall.config import Config, ConfigError
from rollcall.train.data.source import Batch
from rollcall.train.numerics.losses import Objective
from rollcall.train.numerics.randomness import set_seed
from rollcall.train.parallel.experts import Balance
from rollcall.train.parallel.part import Fill, flatten, unflatten
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.clock import BACKWARD, OTHER, clock
from rollcall.train.ranks.world import World
from rollcall.train.torch_private import BatchNorm

OnStep = Callable[[nn.Module, Sequence[Batch], Sequence[torch.Tensor]], object]
"""Called before an update with the model, the batches of this rank's shards, and their losses."""


class Exact(Strategy):
    """Replicas whose weights do not depend on the number of ranks."""

    def __init__(
        self, config: Config, world: World, loss: Objective, on_step: OnStep = lambda *_: None
    ) -> None:
        """Choose this rank's shards, and make torch deterministic; or raise ConfigError."""
        ranks, shards = world.world_size, config.exact_shards
        fitting = [2**k for k in range(shards.bit_length())]
        if ranks not in fitting:
            more = f" (more with exact_shards above {shards})" if ranks > shards else ""
            raise ConfigError(
                f"exact=true needs {', '.join(map(str, fitting[:-1]))} or {shards} ranks{more}, "
                f"but {ranks} were started"
            )
        super().__init__(config, world, loss)
        self._count = shards
        each = shards // ranks  # consecutive ones, so that a rank can sum a whole subtree
        self._own = range(world.rank * each, (world.rank + 1) * each)
        self.stream = 0  # random numbers depend on the virtual shard, not on the rank
        self._on_step = on_step
        # Only kernels that always give the same bits on the same kind of device, and one thread on
        # the CPU: more threads divide a sum into more parts.
        torch.set_num_threads(1)
        # cuBLAS reads this at its first multiplication: https://docs.nvidia.com/cuda/cublas/
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False

    @property
    def shares(self) -> tuple[range, int]:
        """The virtual shards of this rank, and the number of all shards."""
        return self._own, self._count

    def rows(self, batch: int) -> range:
        """Return this rank's rows. All shards have the same size, so the last may be padding."""
        share = math.ceil(batch / self._count)
        return range(self._own.start * share, self._own.stop * share)

    def place(self, model: nn.Module, example: Batch, fill: Fill | None = None) -> None:
        """Place the model with rank 0's weights; ConfigError if it has a BatchNorm layer."""
        name = next((n for n, part in model.named_modules() if isinstance(part, BatchNorm)), None)
        if name is not None:
            raise ConfigError(
                f"exact=true does not work with layer {name} of the model: BatchNorm's statistics "
                "depend on the ranks. Replace it by GroupNorm or LayerNorm, or remove exact=true"
            )
        super().place(model, example, fill)
        for tensor in self.model.state_dict().values():
            if not tensor.is_meta:  # as in a plan
                dist.broadcast(tensor, 0)

    def forward_backward(self, micro_batches: Sequence[Batch], count: float) -> torch.Tensor:
        """Compute the gradient of the mean loss over `count` samples, summed shard by shard."""
        step_seed, self._scale = torch.initial_seed(), 1 / count
        parameters = [weight for weight in self.trained.parameters() if weight.requires_grad]
        whole = Batch.joined(micro_batches)
        # A copy is aligned like any allocation. A view may not be, and a kernel that works on
        # aligned blocks would then add its first numbers in another order.
        pieces = whole.split(len(whole.weights) // len(self._own))
        shards = [piece.map(torch.clone) for piece in pieces]
        losses: list[torch.Tensor] = []
        tree = Tree()
        for number, shard in zip(self._own, shards, strict=True):
            set_seed(step_seed, "shard", number)
            with self._around(last=number == self._own[-1]):
                loss = self._loss_of(self._callables[0], shard)
                clock.enter(BACKWARD)
                (loss / count).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            used = torch.tensor([float(weight.grad is not None) for weight in parameters])
            used = used.to(loss.device)
            held = (torch.zeros_like(w) if w.grad is None else w.grad for w in parameters)
            leaf = flatten([loss.detach(), used, *held])
            self.trained.zero_grad()  # before the sums need memory
            tree.add(leaf)
        clock.enter(OTHER)
        like = losses[0], used, *(weight.data for weight in parameters)
        total, used, *gradients = unflatten(self._exchange(tree.sum()), like)
        for weight, gradient, uses in zip(parameters, gradients, used.tolist(), strict=True):
            weight.grad = gradient if uses else None  # no shard has used it
        for part in self._parts:
            if isinstance(part, Balance):
                part.finish(self.model)
        self._on_step(self.model, shards, losses)
        # The caller sums this over all ranks; zeros from the other ranks change no bit.
        return total * (self.world.rank == 0)

    def finish_with_nan(self) -> bool:
        """Raise a MemoryError: smaller pieces of the step would change the result."""
        raise MemoryError(
            f"rank {self.world.rank} has too little memory for a virtual shard of exact mode: "
            "raise exact_shards, which changes the result, or choose a smaller model"
        )

    def add(self, terms: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum the terms of all shards along the same tree."""
        tree = Tree()
        for term in terms:
            tree.add([term])
        return self._exchange(tree.sum())[0]

    def _exchange(self, vectors: list[torch.Tensor]) -> list[torch.Tensor]:
        for bit in range(self.world.world_size.bit_length() - 1):
            peer = self.world.rank ^ (1 << bit)
            theirs = [torch.empty_like(vector) for vector in vectors]
            transfers = [dist.P2POp(dist.isend, vector, peer) for vector in vectors]
            transfers += [dist.P2POp(dist.irecv, vector, peer) for vector in theirs]
            for work in dist.batch_isend_irecv(transfers):
                work.wait()
            vectors = [mine + other for mine, other in zip(vectors, theirs, strict=True)]
        return vectors


class Tree:
    """Sums lists of tensors along a binary tree as they arrive; their number is a power of two."""

    def __init__(self) -> None:
        self._sums: list[tuple[int, list[torch.Tensor]]] = []  # (number of terms, their sum)

    def add(self, term: list[torch.Tensor]) -> None:
        """Add a leaf, and join sums of the same number of leaves."""
        leaves = 1
        while self._sums and self._sums[-1][0] == leaves:
            _, before = self._sums.pop()
            term = [a + b for a, b in zip(before, term, strict=True)]
            leaves *= 2
        self._sums.append((leaves, term))

    def sum(self) -> list[torch.Tensor]:
        """Return the sum of all leaves."""
        ((_, root),) = self._sums
        return root
