"""Scikit-learn's bundled handwritten digits: 1,797 real images of 8×8, nothing to download."""

from __future__ import annotations

import torch

from train.data.images import Form
from train.data.source import InMemory, Source
from train.schema import Data
from train.world import World

FORM = Form(edge=8, mean=(0.0,), std=(1.0,))


def digits(_config: Data, _world: World) -> Source:
    """Every fifth image validates, the others train."""
    from sklearn.datasets import load_digits  # half a second of imports that other data spares

    bunch = load_digits()
    inputs = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    targets = torch.tensor(bunch.target, dtype=torch.int64)
    held_out = torch.arange(len(targets)) % 5 == 4

    return Source(
        train=InMemory(inputs[~held_out], targets[~held_out]),
        validation=InMemory(inputs[held_out], targets[held_out]),
        train_size=int((~held_out).sum()),
        validation_size=int(held_out.sum()),
        shape=FORM.shape,
        classes=10,
    )
