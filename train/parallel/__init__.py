"""How the model is spread over the ranks: a mesh, and one small part for each of its dimensions.

`strategy.py` applies them in the order pipeline, tensor, context, shard, replicate. A new strategy
is a file with a `Part` and a line in `mesh.PRESETS`; a new dimension also needs its name in
`mesh.DIMENSIONS` and a line in `assembly.parts`. Importing this module pulls no torch:
`train.config` checks meshes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from train.config import Config
    from train.data.source import Batch
    from train.parallel.part import MakeOptimizer
    from train.parallel.strategy import PerSampleLoss
    from train.world import World


class Strategy(Protocol):
    """What the loop asks of a way to spread a model; it never asks which one it is.

    Attributes:
        data_rank, data_ranks: which share of every batch is this rank's, and of how many. Ranks
            that hold parts of one replica have the same share.
        stream: which stream of random numbers is this rank's.
    """

    data_rank: int
    data_ranks: int
    stream: int

    @property
    def model(self) -> nn.Module:
        """What this rank holds of the placed model, under its own names."""

    @property
    def shares(self) -> tuple[range, int]:
        """This rank's shares of samples that are evaluated, and of how many."""

    def rows(self, batch: int) -> range:
        """This rank's rows in a global batch of this size, as many on every rank."""

    def place(self, model: nn.Module, example: Batch) -> None:
        """Take the model to this rank's device, and what it takes to keep the ranks alike.

        Args:
            model: the same on every rank.
            example: a few samples, as the model takes them.
        """

    def settle(self, example: Batch) -> None:
        """After this the first step computes as any other does; not needed where none is done.

        Args:
            example: a few samples.
        """

    def describe(self) -> str:
        """Who holds what of the placed model, and what each step communicates."""

    def optimizer(self, make: MakeOptimizer) -> torch.optim.Optimizer:
        """What updates this rank's parameters.

        Args:
            make: an optimizer for groups of parameters, {"params": […]} each.
        """

    def forward_backward(self, micro_batches: Sequence[Batch], count: int) -> torch.Tensor:
        """Leave on every rank the gradient of the mean loss over all `count` samples of the step.

        Returns:
            A scalar on its device; its sum over all ranks is the sum of the weighted losses.
        """

    def forward(self, batch: Batch) -> torch.Tensor:
        """The model's outputs for this rank's rows, without gradients."""

    def clip(self, max_norm: float | None, divisor: torch.Tensor | None = None) -> torch.Tensor:
        """Scale the gradient to at most this norm over the whole model; return its norm before.

        Args:
            max_norm: None only measures.
            divisor: first divides the gradient, as fp16 needs it.
        """

    def rejoin(self) -> bool:
        """Let the other ranks finish `forward_backward`, which raised an exception on this one.

        Returns:
            Whether it could; then the gradient is NaN on every rank.
        """

    def forget(self) -> None:
        """Drop what a gradient that is not finite has left for the next step."""

    @property
    def replicas(self) -> list[list[int]]:
        """All ranks, in groups that hold the same weights."""

    def add(self, terms: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of a small tensor for each share of every rank, the same on all."""

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Model and optimizer under global names, for saving or for loading into."""

    def load_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Put back what `state` returned and a checkpoint has filled."""


def build(config: Config, world: World, loss: PerSampleLoss) -> Strategy:
    """The strategy that the configuration names, over a mesh of all ranks; all call it together.

    Raises:
        ConfigError: it cannot work at this world size, or with this model or batch.
    """
    from train.parallel.exact import Exact
    from train.parallel.strategy import Composed

    return (Exact if config.exact else Composed)(config, world, loss)
