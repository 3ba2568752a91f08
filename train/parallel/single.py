"""One rank holds the whole model and computes the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict

from train.config import ConfigError
from train.data.source import Batch
from train.precision import autocast
from train.world import World

# Flat optimizer names (state.<parameter>.<quantity>) are the same for every strategy and mesh.
OPTIONS = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)


class Single:
    """The reference that every other strategy must equal, and the base of the replicated ones."""

    def __init__(
        self,
        precision: str,
        world: World,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        self.world = world
        self.model: nn.Module
        self._precision = precision
        self._loss = loss
        self._check()

    def _check(self) -> None:
        if self.world.world_size != 1:
            raise ConfigError(
                f"parallel.strategy=single trains on one rank, but {self.world.world_size} were "
                "started: start one, or choose parallel.strategy=ddp"
            )

    def rows(self, batch: int) -> range:
        """All of them."""
        return range(batch)

    def place(self, model: nn.Module, example: Batch) -> None:  # noqa: ARG002 (for replicas)
        """Take the model to the device."""
        self.model = model.to(self.world.device)

    def parameters(self) -> Iterable[nn.Parameter]:
        """All that the model has."""
        return self.model.parameters()

    def forward_backward(self, micro_batches: Sequence[Batch], count: int) -> torch.Tensor:
        """Accumulate the gradient of the summed loss over `count`, micro-batch by micro-batch.

        Summing and dividing by the count of the whole step makes the result independent of how
        the batch was cut.
        """
        total = torch.zeros((), device=self.world.device)
        for number, batch in enumerate(micro_batches):
            with self._communicate(number == len(micro_batches) - 1):
                with autocast(self._precision, self.world.device):
                    outputs = self.model(batch.inputs)
                loss = (self._loss(outputs.float(), batch.targets) * batch.weights).sum()
                (loss * (self._averaged_over() / count)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    @torch.no_grad()
    def forward(self, batch: Batch) -> torch.Tensor:
        """The outputs of the model in evaluation mode: (rows, classes), fp32."""
        self.model.eval()
        with autocast(self._precision, self.world.device):
            outputs: torch.Tensor = self.model(batch.inputs)
        self.model.train()
        return outputs.float()

    def clip(self, max_norm: float) -> torch.Tensor:
        """Every rank holds the whole gradient, so its own norm is the global one."""
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Model and optimizer under the names of the plain model."""
        model, optim = state_dict.get_state_dict(self.model, optimizer, options=OPTIONS)
        return {"model": model, "optim": optim}

    def load_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load both in place."""
        state_dict.set_state_dict(
            self.model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=OPTIONS,
        )

    def _communicate(self, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def _averaged_over(self) -> int:
        """By how many ranks the gradients will be divided."""
        return 1
