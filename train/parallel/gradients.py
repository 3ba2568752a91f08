"""Clipping to a global norm, on any mesh."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in groups that lie on one mesh; torch refuses operations that mix them."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        groups[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    return list(groups.values())


@torch.no_grad()
def clip(
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    group: dist.ProcessGroup | None,
    divisor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scale the gradients to at most this norm over all ranks; return the norm before, exact.

    Args:
        max_norm: None only measures.
        divisor: first divides the gradients, as fp16 needs it.
        group: the ranks that hold other layers, if there are any.
    """
    groups = by_mesh(parameter for parameter in parameters if parameter.grad is not None)
    gradients: list[list[Any]] = [[parameter.grad for parameter in group] for group in groups]
    norms = [_whole(nn.utils.get_total_norm(group)) for group in gradients]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    if group is not None:
        square = norm.square()
        dist.all_reduce(square, group=group)
        norm = square.sqrt()
    if divisor is not None:
        norm = norm / divisor.to(norm.device)
    if max_norm is None and divisor is None:
        return norm
    scale = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1)
    if divisor is not None:
        scale = scale / divisor.to(norm.device)
    for gradient in (gradient for group in gradients for gradient in group):
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(scale)
    return norm


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
