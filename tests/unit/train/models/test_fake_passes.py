"""Passes of models in 16 bits, compiled and recomputed; most of them on fake tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from rollcall.config import parse
from rollcall.train import models
from rollcall.train.models import activations
from rollcall.train.numerics.losses import in_fp32
from rollcall.train.numerics.precision import autocast

ROWS, LENGTH, CLASSES = 2, 16, 32
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PASSES = [
    *((precision, "none", False) for precision in FORMATS),
    *(("bf16", recomputed, False) for recomputed in ("blocks", "selective")),
    *(("bf16", recomputed, True) for recomputed in ("none", "blocks", "selective")),
]
"""Number format, what is recomputed, and whether the blocks are compiled."""


@pytest.mark.parametrize(("precision", "recomputed", "compiled"), PASSES)
def test_a_pass_computes_in_the_format_and_keeps_fp32(
    precision: str, recomputed: str, compiled: bool
) -> None:
    """On a CPU: without a driver, autocast is off on a fake GPU, and backward passes fail there."""
    words = [
        "gpt",
        "model.num_layers=2",
        f"precision={precision}",
        f"model.activation_checkpointing={recomputed}",
    ]
    config = parse([*words, f"train.compile={compiled}".lower()])[1]
    source: Any = SimpleNamespace(shape=(LENGTH,), classes=CLASSES, form=None)
    cpu = torch.device("cpu")
    with FakeTensorMode():
        model = models.maker(config, source, cpu)()
        tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        if compiled:
            models.compile_blocks(model, backend="aot_eager")
        with autocast(precision, cpu)():
            outputs = model(tokens)
        assert (outputs.dtype, outputs.shape) == (FORMATS[precision], (ROWS, LENGTH, CLASSES))
        loss = functional.cross_entropy(in_fp32(outputs).flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.dtype == torch.float32
        for name, weight in model.named_parameters():
            assert weight.grad is not None, name
            assert (weight.grad.dtype, weight.grad.shape) == (torch.float32, weight.shape)


@pytest.mark.parametrize("recomputed", ["none", "blocks", "selective"])
def test_blocks_of_a_kind_are_compiled_once(recomputed: str) -> None:
    """torch leaves code as it is after 8 compilations of the same lines."""
    words = ["gpt", "model.num_layers=10", f"model.activation_checkpointing={recomputed}"]
    source: Any = SimpleNamespace(shape=(LENGTH,), classes=CLASSES, form=None)
    model = models.maker(parse(words)[1], source, torch.device("cpu"))()
    torch._dynamo.reset()
    counters.clear()
    backend = CompileCounter()
    models.compile_blocks(model, backend=backend)  # type: ignore[arg-type]
    for _ in range(2):
        model(torch.zeros(ROWS, LENGTH, dtype=torch.int64)).sum().backward()
    kinds = {type(block) for block in model.children()}
    # The embedding, the norm and the head are one kernel each already.
    assert (backend.frame_count, len(kinds), counters["graph_break"]) == (1, 4, {})


@pytest.mark.parametrize("mode", ["blocks", "selective"])
def test_a_compiled_block_counts_its_statistics_once(mode: str) -> None:
    images = torch.randn(4, 3, 8, 8)
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(2))
        model = nn.Sequential(*blocks)
        activations.recompute(model, mode)
        if compiled:
            models.compile_blocks(model, backend="aot_eager")
        model(images).square().sum().backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        found.append({**gradients, **dict(model.named_buffers())})
    torch.testing.assert_close(*found)
    assert found[1]["0.1.num_batches_tracked"] == 1
