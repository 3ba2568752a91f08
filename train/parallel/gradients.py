"""Clip gradients to a global norm, on any mesh."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group the parameters by mesh, device and format; torch has no operations over several."""
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups[mesh, parameter.device, parameter.dtype].append(parameter)
    return list(groups.values())


def clip(
    groups: Sequence[Sequence[nn.Parameter]],  # all weights, as `by_mesh` groups them
    max_norm: float | None,  # None only measures the norm
    pipeline: dist.ProcessGroup | None,  # ranks that hold other layers, if any
    divisor: torch.Tensor | None = None,  # divides the gradients first, as fp16 needs
) -> torch.Tensor:
    """Scale the gradients to at most this norm over all ranks; return the norm before, exact."""
    gradients = [[one.grad for one in group if one.grad is not None] for group in groups]
    norms = [_norm(group) for group in gradients if group]
    norms = norms or [groups[0][0].new_zeros(())]  # all weights of this pipeline stage are frozen
    norms = [norm.to(norms[0].device) for norm in norms]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if pipeline is not None:
        square = norm.square()
        dist.all_reduce(square, group=pipeline)
        norm = square.sqrt()
    if max_norm is None and divisor is None:
        return norm
    divisor = torch.ones_like(norm) if divisor is None else divisor.to(norm.device)
    norm = norm / divisor
    scale = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1)
    scale = scale / divisor
    for group in filter(None, gradients):
        scale = scale.to(group[0].device)
        for gradient in group:
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(scale)
    return norm


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of the gradients of one mesh."""
    if isinstance(gradients[0], DTensor):
        norm = nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    # As `get_total_norm`, which takes ten times as long to group a few small tensors.
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return total
