"""How fast is that? Tokens, and the share of what a GPU could compute, from samples per second."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from train.data.source import Batch, Source

# Dense operations per second as NVIDIA's data sheets state them, by number format.
HOPPER = {"fp32": 67e12, "tf32": 494e12, "bf16": 989e12, "fp16": 989e12, "fp8": 1979e12}
AMPERE = {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12}
PEAKS = {"H100": HOPPER, "H200": HOPPER, "A100": AMPERE}


def factors(
    model: nn.Module,
    example: Batch,
    source: Source,
    precision: str,
    device: torch.device,
    world_size: int,
) -> dict[str, float]:
    """By what to multiply samples per second for further figures of a line of metrics.

    Tokens per second for sequences; on GPUs whose peak is known `mfu`, the share of the peak that
    the model's own operations take, without those that are computed again: Chowdhery et al., PaLM,
    appendix B, https://arxiv.org/abs/2204.02311.

    Args:
        model: the whole model, as it was built.
        example: a few samples.
        world_size: ranks, with a GPU each.
    """
    found = {}
    if len(source.shape) == 1 and not example.inputs.is_floating_point():
        found["tokens_per_second"] = float(source.shape[0])
    peak = _peak(precision, device)
    operations = operations_of(model, example) if peak else None
    if peak and operations:
        found["mfu"] = operations / len(example.weights) / peak / world_size
    return found


def operations_of(model: nn.Module, example: Batch) -> int | None:
    """Floating-point operations of a forward and a backward pass over these samples.

    Counted without computing anything; None for a model that looks at its numbers.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    nowhere = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            torch.func.functional_call(model, nowhere, (example.inputs.to("meta"),))
    except (RuntimeError, NotImplementedError):
        return None
    forward: int = counter.get_total_flops()
    return 3 * forward  # a backward pass multiplies twice as often


def _peak(precision: str, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peaks.get(precision) for key, peaks in PEAKS.items() if key in name), None)
