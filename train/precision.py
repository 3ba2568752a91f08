"""In which number formats does a step compute?"""

from __future__ import annotations

import torch

from train.schema import ConfigError

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
GROWTH_INTERVAL = 2000


def prepare(precision: str, device: torch.device) -> None:
    """Tell torch how exact multiplications of fp32 numbers must be.

    Raises:
        ConfigError: this device does not have the number format.
    """
    if precision in ("tf32", "fp8"):
        _require(precision, device)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    # By itself cuDNN convolves fp32 numbers in tf32.
    formats = "tf32" if precision == "tf32" else "ieee"
    torch.backends.cudnn.conv.fp32_precision = formats  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = formats  # type: ignore[attr-defined]


def _require(precision: str, device: torch.device) -> None:
    needs = {"tf32": (8, 0), "fp8": (8, 9)}[precision]
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if found < needs:
            raise ConfigError(
                f"precision={precision} needs a GPU of compute capability {needs[0]}.{needs[1]}, "
                f"and {torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}: choose bf16, "
                "fp16 or fp32"
            )
    elif precision == "tf32":
        raise ConfigError(
            "precision=tf32 is a number format of NVIDIA GPUs, and this run computes on "
            f"{device.type}: choose fp32 or bf16"
        )


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """The context of forward passes: 16 bits where asked for and safe, the weights stay fp32."""
    dtype = AUTOCAST.get(precision)
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


class Scaler:
    """Enlarges the gradients of fp16, which would vanish below 6e-8, as much as they allow.

    Micikevicius et al., Mixed precision training, https://arxiv.org/abs/1710.03740. Whether a
    gradient overflowed is read off the norm over all ranks, so all of them, stages of a pipeline
    included, take the same decision, and nothing waits for the GPU.

    Attributes:
        scale: a power of two, on the device.
        steps: since it last changed.
    """

    def __init__(self, device: torch.device, interval: int = GROWTH_INTERVAL) -> None:
        self.scale = torch.full((), 2.0**16, device=device)
        self.steps = torch.zeros((), device=device)
        self._interval = interval
        self._before = self.state()

    def update(self, overflowed: torch.Tensor) -> None:
        """Halve the scale after a step that overflowed, double it after many that did not."""
        self._before = {name: tensor.clone() for name, tensor in self.state().items()}
        self.steps.add_(1)
        grow = (self.steps >= self._interval) & ~overflowed
        factor = 1 + grow.float() - 0.5 * overflowed.float()
        self.scale.mul_(factor)
        self.steps.mul_((factor == 1).float())

    def undo(self) -> None:
        """Take the last update back: its step is done again."""
        for name, tensor in self.state().items():
            tensor.copy_(self._before[name])

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps, to be filled in place."""
        return {"scale": self.scale, "steps": self.steps}
