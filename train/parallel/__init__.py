"""How the model is spread over the ranks: a mesh, and one `Part` for each of its dimensions.

`strategy.py` applies them in the order pipeline, tensor, context, shard, replicate. A new strategy
is a file with a `Part` and a line in `PRESETS` of `rollcall/config/mesh.py`; a new dimension also
needs its name in `DIMENSIONS` and a line in `assembly.parts`. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rollcall.train.data.source import Batch
    from rollcall.train.numerics.losses import Sums
    from rollcall.train.parallel.part import Fill, MakeOptimizer


class Strategy(Protocol):
    """A way to spread a model, as the training loop uses it.

    Ranks that hold parts of one replica have the same share of every batch.
    """

    data_rank: int  # the number of this rank's share of every batch
    data_ranks: int  # the number of shares
    stream: int  # of random numbers: the same on ranks that compute the same activations

    @property
    def model(self) -> nn.Module:
        """The part of the model that this rank holds, under the names of the plain model."""

    @property
    def shares(self) -> tuple[range, int]:
        """This rank's shares of the samples in an evaluation, and the number of shares."""

    def rows(self, batch: int) -> range:
        """Return this rank's rows of a global batch; every rank has the same number of rows."""

    def place(self, model: nn.Module, example: Batch, fill: Fill | None = None) -> None:
        """Move the model, the same on every rank, to this rank's device and spread it.

        `fill` gives values to a model on the meta device; without it, the model stays there.
        """

    def warm_up(self, example: Batch) -> None:
        """Prepare for training, so that the first step computes exactly like any other."""

    def example_pass(self, example: Batch) -> torch.Tensor:
        """Leave the gradient of the mean loss of these samples; return the mean loss.

        Every rank passes the same samples. No later pass computes anything else because of it.
        """

    def plain_pass(self, model: nn.Module, example: Batch) -> torch.Tensor:
        """Compute the same with a model that is not spread."""

    @property
    def changes_passes(self) -> bool:
        """Whether forward or backward passes differ from the plain model's."""

    @property
    def rounds(self) -> bool:
        """Whether the spread model computes with weights of 16 bits, even if asked for fp32."""

    @property
    def suspicions(self) -> list[str]:
        """Likely causes if the spread model computes something else than the plain one."""

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """In how many pieces activations may be cut, each with the number of this rank's piece."""

    @property
    def copies(self) -> int:
        """The number of ranks that compute the same activations outside of cut layers."""

    def among_copies(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of each of those ranks: (copies, *values.shape)."""

    def describe(self) -> str:
        """Describe what each rank holds of the model, and what each step communicates."""

    def optimizer(self, make: MakeOptimizer) -> torch.optim.Optimizer:
        """Return the optimizer that `make` returns for groups of this rank's parameters."""

    def forward_backward(self, micro_batches: Sequence[Batch], count: float) -> torch.Tensor:
        """Leave on every rank the gradient of the mean loss over all `count` samples of the step.

        The scalar returned, summed over all ranks, is the sum of the weighted losses.

        Raises:
            UnusedWeights: the gradient is NaN on every rank, and `allow_unused` is needed.
        """

    def forward(self, batch: Batch) -> Any:
        """Return the model's outputs for this rank's rows, without gradients."""

    def sums(self, batch: Batch) -> Sums:
        """Return what a loss that calls the model itself adds up to, without gradients."""

    def clip(self, max_norm: float | None, divisor: torch.Tensor | None = None) -> torch.Tensor:
        """Scale the gradient to at most this norm over the whole model; return the norm before.

        `max_norm=None` only measures it. `divisor` divides the gradient first, as fp16 needs.
        """

    def finish_with_nan(self) -> bool:
        """Complete the communication of `forward_backward`, which failed on this rank, with NaN.

        Return whether that worked; then the gradient is NaN on every rank.
        """

    def allow_unused(self) -> None:
        """Let later steps leave weights out of the loss; every rank calls it together."""

    def forget(self) -> None:
        """Drop what a gradient that is not finite would carry over to the next step."""

    def replicas(self, alike: Collection[str]) -> list[list[int]]:
        """Return all ranks, in groups that differ only in these dimensions of the weights."""

    def alike(self, tensor: torch.Tensor, is_buffer: bool) -> frozenset[str]:
        """Return the dimensions over whose ranks this weight or buffer is the same."""

    def add(self, terms: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum small tensors over all shares, each once; return the sum on all ranks."""

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return model and optimizer under global names, to be saved or filled in place."""

    def load_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load what `state` returned and a checkpoint has filled."""
