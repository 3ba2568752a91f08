"""In which number formats does a step compute?"""

from __future__ import annotations

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """The context of forward passes: bf16 where asked for and safe, the weights stay fp32."""
    dtype = DTYPES[precision]
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16)
