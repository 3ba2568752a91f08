"""The hash of a set of weights."""

from __future__ import annotations

import torch

from rollcall.train.data.source import Batch
from rollcall.train.exact import fingerprint, recorder


def test_the_hash_depends_on_names_shapes_types_and_bits_but_not_on_order() -> None:
    a, b = torch.arange(6.0), torch.ones(2)
    plain = fingerprint.of({"a": a, "b": b})
    assert len(plain) == 64 and plain == fingerprint.of({"b": b, "a": a.clone()})
    flipped = a.clone()
    flipped.view(torch.int32)[3] ^= 1
    others = [{"a": b, "b": a}, {"a": a.view(2, 3), "b": b}, {"a": a.int(), "b": b}, {"a": a}]
    others += [{"a": flipped, "b": b}, {"a": a, "c": b}]
    assert len({plain, *map(fingerprint.of, others)}) == 7
    assert fingerprint.of({"a": a.view(2, 3).t()}) != fingerprint.of({"a": a.view(3, 2)})


def test_samples_of_any_type_have_a_fingerprint() -> None:
    found = []
    for dtype in (torch.bfloat16, torch.float32, torch.bool):
        inputs = torch.arange(6).to(dtype).view(2, 3).t()
        found.append(recorder._digest(Batch(inputs, torch.tensor(1), torch.ones(3))))
    assert len({*found}) == 3
