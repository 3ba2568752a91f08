"""The number formats of a step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from rollcall.config.schema import ConfigError

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
GROWTH_INTERVAL = 2000
"""Steps without overflow after which the scale of fp16 doubles."""


def prepare(precision: str, device: torch.device) -> None:
    """Set how precisely torch multiplies fp32 numbers; ConfigError if the device cannot do it."""
    needs = {"tf32": (8, 0), "fp8": (8, 9)}.get(precision, (0, 0))
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < needs:
        raise ConfigError(
            f"precision={precision}: expected a GPU of compute capability {needs[0]}.{needs[1]}, "
            f"got {torch.cuda.get_device_name(device)} with {found[0]}.{found[1]}; choose bf16, "
            "fp16 or fp32"
        )
    if device.type != "cuda" and precision == "tf32":
        raise ConfigError(
            f"precision=tf32: expected an NVIDIA GPU, got device {device.type}; choose fp32 or bf16"
        )
    torch.backends.cudnn.benchmark = True  # shapes seldom change; exact mode sets it back
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    # By default cuDNN convolves fp32 numbers in tf32.
    formats = "tf32" if precision == "tf32" else "ieee"
    torch.backends.cudnn.conv.fp32_precision = formats  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = formats  # type: ignore[attr-defined]


def advice(precision: str, device: torch.device) -> str:
    """Return what to say about a GPU whose tensor cores a run would leave unused, or nothing."""
    is_gpu = precision == "fp32" and device.type == "cuda"
    if not is_gpu or torch.cuda.get_device_capability(device) < (8, 0):
        return ""
    return (
        "precision=fp32 does not use the tensor cores of this GPU: precision=bf16 or tf32 is "
        "usually several times as fast"
    )


def autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return the factory of a pass's context: 16 bits if configured; the weights stay fp32."""
    dtype = AUTOCAST.get(precision)
    return partial(torch.autocast, device.type, dtype=dtype) if dtype else nullcontext


class Scaler:
    """Scales the gradients of fp16 up, since values below 6e-8 would become zero.

    Micikevicius et al., Mixed precision training, https://arxiv.org/abs/1710.03740. An overflow is
    detected in the norm over all ranks, so all ranks, including pipeline stages, decide the same,
    and nothing waits for the GPU.
    """

    def __init__(self, device: torch.device, interval: int = GROWTH_INTERVAL) -> None:
        self.scale = torch.full((), 2.0**16, device=device)  # always a power of two
        self.steps = torch.zeros((), device=device)  # since the scale last changed
        self._interval = interval
        self._before = self.state()

    def update(self, overflowed: torch.Tensor) -> None:
        """Halve the scale after a step that overflowed; double it after many that did not."""
        self._before = {name: tensor.clone() for name, tensor in self.state().items()}
        self.steps.add_(1)
        grow = (self.steps >= self._interval) & ~overflowed
        factor = 1 + grow.float() - 0.5 * overflowed.float()
        self.scale.mul_(factor)
        self.steps.mul_((factor == 1).float())

    def undo(self) -> None:
        """Undo the last update, before its step is repeated."""
        for name, tensor in self.state().items():
            tensor.copy_(self._before[name])

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint saves, and fills in place on a resume."""
        return {"scale": self.scale, "steps": self.steps}
