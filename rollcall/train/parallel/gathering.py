"""Losses of all samples of a step, wherever they are: the outputs of all ranks are gathered."""

from typing import Any

import torch
import torch.distributed as dist

from rollcall.train.data.source import Batch
from rollcall.train.torch_private import tree_map_only


class _Rows(torch.autograd.Function):
    """The rows of all ranks. A rank's gradient is the sum of what all ranks' losses give it."""

    @staticmethod
    def forward(_: Any, rows: torch.Tensor) -> torch.Tensor:
        every = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(every, rows.contiguous())
        return torch.cat(every)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def of_all_ranks(outputs: Any, batch: Batch) -> tuple[Any, Batch]:
    """Return the outputs and the batch of all ranks, without padding; only own rows have weights.

    Every rank has the same number of rows. The sums of the ranks add up to the loss of all rows,
    and so do their gradients.
    """
    whole: Batch = batch._replace(inputs=outputs).map(_Rows.apply)
    weights = torch.zeros_like(whole.weights)
    first = dist.get_rank() * len(batch.weights)
    weights[first : first + len(batch.weights)] = batch.weights
    if not bool((whole.weights > 0).all()):
        real = whole.weights > 0
        outputs = tree_map_only(torch.Tensor, lambda rows: rows[real], whole.inputs)
        targets = tree_map_only(torch.Tensor, lambda rows: rows[real], whole.targets)
        return outputs, Batch(outputs, targets, weights[real])
    return whole.inputs, whole._replace(weights=weights)


def twice(outputs: Any, batch: Batch) -> tuple[Any, Batch]:
    """Return the rows with a copy of each: also of two rows, every one then has others like it."""
    both: Batch = batch._replace(inputs=outputs).map(lambda rows: torch.cat([rows, rows]))
    return both.inputs, both
