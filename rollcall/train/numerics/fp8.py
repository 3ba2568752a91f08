"""Linear layers that multiply in 8 bits.

Micikevicius et al., FP8 formats for deep learning, https://arxiv.org/abs/2209.05433: weights and
activations in e4m3, gradients in e5m2, each tensor scaled by its largest value. The weights stay
fp32. GPUs use their tensor cores; CPUs compute the same numbers, slowly.
"""

from typing import Any

import torch
from torch import nn

from rollcall.train import torch_private

MULTIPLE = 16
"""The kernels need matrices whose sides are multiples of this."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Scaled = tuple[torch.Tensor, torch.Tensor]  # values in 8 bits, and their scale


def use(model: nn.Module) -> None:
    """Let the linear layers whose widths divide by 16 multiply in 8 bits."""
    for module in model.modules():
        if type(module) is nn.Linear and not any(size % MULTIPLE for size in module.weight.shape):
            module.__class__ = Linear


class Linear(nn.Linear):
    """A linear layer that multiplies in 8 bits and returns bf16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (…, in_features) to (…, out_features)."""
        out: torch.Tensor = _Multiply.apply(x.reshape(-1, x.shape[-1]), self.weight)
        if self.bias is not None:
            out = out + self.bias.to(out)
        return out.view(*x.shape[:-1], -1)


class _Multiply(torch.autograd.Function):
    """x @ weight.T for x (rows, in) and weight (out, in)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        small, scale = _round(_padded(x), E4M3)
        # Only the weight itself is kept, not a copy: sharding may free it meanwhile.
        ctx.save_for_backward(small, scale, weight)
        ctx.rows, ctx.dtype = len(x), x.dtype
        return _multiply((small, scale), _round(weight, E4M3))[: len(x)]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        small, scale, weight = ctx.saved_tensors
        gradient, its_scale = _round(_padded(gradients[0]), E5M2)
        rounded, of_weight = _round(weight, E4M3)
        to_x = _multiply((gradient, its_scale), (rounded.t().contiguous(), of_weight))
        turned = (gradient.t().contiguous(), its_scale), (small.t().contiguous(), scale)
        return to_x[: ctx.rows].to(ctx.dtype), _multiply(*turned, torch.float32).to(weight.dtype)


def _multiply(a: Scaled, b: Scaled, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a @ b.T of (n, k) and (m, k), both contiguous, times their scales."""
    return torch_private.scaled_mm(a[0], b[0].t(), scale_a=a[1], scale_b=b[1], out_dtype=dtype)


def _round(x: torch.Tensor, dtype: torch.dtype) -> Scaled:
    """Return the tensor in 8 bits and its scale: multiply by it to get the values back."""
    scale = x.detach().abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def _padded(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(x, (0, 0, 0, -len(x) % MULTIPLE))
