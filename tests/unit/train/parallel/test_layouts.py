"""Tensors that were sent as one vector come back in their layouts."""

from __future__ import annotations

import torch

from rollcall.train.parallel.part import flatten, unflatten


def test_a_transposed_tensor_comes_back_transposed() -> None:
    """Fused Adam would mix the elements of a transposed weight and a contiguous gradient."""
    tensors = [torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4).t(), torch.tensor(2.0)]
    for tensor, value in zip(tensors, unflatten(flatten(tensors), tensors), strict=True):
        assert torch.equal(value, tensor) and value.stride() == tensor.stride()
