"""Evaluation mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; then give each module back the mode that it had.

    `model.train()` instead would also train what its author froze with `eval()`, such as the batch
    normalization of a pretrained part.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
