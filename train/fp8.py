"""Matrix multiplications of linear layers in 8 bits.

Micikevicius et al., FP8 formats for deep learning, https://arxiv.org/abs/2209.05433: weights and
activations in e4m3, gradients in e5m2, each tensor scaled by its largest number. The weights stay
fp32. On GPUs this runs on the tensor cores; CPUs compute the same numbers, slowly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MULTIPLE = 16  # of both sides of what the kernels multiply
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def use(model: nn.Module) -> list[str]:
    """Let the linear layers whose widths divide by 16 multiply in 8 bits; return the others."""
    left = []
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
                left.append(name)
            else:
                module.__class__ = Linear
    return left


class Linear(nn.Linear):
    """A linear layer that multiplies in 8 bits and returns bf16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (…, in_features) to (…, out_features)."""
        rows = x.reshape(-1, x.shape[-1])
        out: torch.Tensor = _Multiply.apply(rows, self.weight)
        if self.bias is not None:
            out = out + self.bias.to(out)
        return out.view(*x.shape[:-1], -1)


class _Multiply(torch.autograd.Function):
    """x @ weight.T for x (rows, in) and weight (out, in)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        small, scale = _round(_padded(x), E4M3)
        # Of the weight nothing is kept but itself, which sharding may take away meanwhile.
        ctx.save_for_backward(small, scale, weight)
        ctx.rows, ctx.dtype = len(x), x.dtype
        return _multiply(small, scale, *_round(weight, E4M3))[: len(x)]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        small, scale, weight = ctx.saved_tensors
        gradient, its_scale = _round(_padded(gradients[0]), E5M2)
        rounded, of_weight = _round(weight, E4M3)
        to_x = _multiply(gradient, its_scale, rounded.t().contiguous(), of_weight)
        to_weight = _multiply(
            gradient.t().contiguous(), its_scale, small.t().contiguous(), scale, torch.float32
        )
        return to_x[: ctx.rows].to(ctx.dtype), to_weight.to(weight.dtype)


def _multiply(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The product a @ b.T of (n, k) and (m, k), both contiguous, times their scales."""
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype)


def _round(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor in 8 bits, and by what to multiply it again."""
    scale = x.detach().abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def _padded(x: torch.Tensor) -> torch.Tensor:
    """With rows of zeros up to a multiple."""
    return nn.functional.pad(x, (0, 0, 0, -len(x) % MULTIPLE))
