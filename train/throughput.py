"""Tokens per second and model FLOPs utilization, from samples per second."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rollcall.train.data.calling import arguments_of
from rollcall.train.data.source import Batch, Source
from rollcall.train.dist.run import Run

# Dense operations per second in NVIDIA's data sheets, by number format.
HOPPER = {"fp32": 67e12, "tf32": 494e12, "bf16": 989e12, "fp16": 989e12, "fp8": 1979e12}
AMPERE = {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12}
META = torch.device("meta")
PEAKS = {"H100": HOPPER, "H200": HOPPER, "A100": AMPERE}


def factors(run: Run, model: nn.Module, example: Batch, source: Source) -> dict[str, float]:
    """Return by what to multiply samples per second for further figures of metrics.jsonl.

    `tokens_per_second` for sequences. On GPUs whose peak is known, `mfu`: the share of the peak
    that the model's own operations take, without recomputed ones; see Chowdhery et al., PaLM,
    appendix B, https://arxiv.org/abs/2204.02311. The model must not be spread yet.
    """
    config, world = run.config, run.world
    found = {}
    is_tensor = isinstance(example.inputs, torch.Tensor)
    if is_tensor and len(source.shape) == 1 and not example.inputs.is_floating_point():
        found["tokens_per_second"] = float(source.shape[0])
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
    peak = next((peaks.get(config.precision) for key, peaks in PEAKS.items() if key in gpu), None)
    operations = operations_of(model, example) if peak else None
    if peak and operations:
        found["mfu"] = operations / len(example.weights) / peak / world.world_size
    return found


def operations_of(model: nn.Module, example: Batch) -> int | None:
    """Return the floating-point operations of a forward and a backward pass over these samples.

    They are counted without computing anything. None if the model's code depends on values.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            torch.func.functional_call(model, shapes, *arguments_of(example.to(META)))
    except (RuntimeError, NotImplementedError):
        return None
    forward: int = counter.get_total_flops()
    return 3 * forward  # a backward pass takes twice the operations of a forward pass
