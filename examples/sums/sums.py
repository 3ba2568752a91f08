"""Sums as text: a language model reads `37+5=` and learns to write `42`."""

import random

import torch

from rollcall.train.data.source import InMemory, Source

LENGTH, VOCABULARY = 12, 256  # bytes, as in the text on which the model was trained before
IGNORED = -100  # a target that does not count


def sums(count: int = 2000):
    """Return samples of bytes; only the answer counts, not the question and the padding."""
    draw = random.Random(0)
    inputs = torch.full((count, LENGTH), ord(" "))
    targets = torch.full((count, LENGTH), IGNORED)
    for row in range(count):
        first, second = draw.randrange(100), draw.randrange(100)
        question, answer = f"{first}+{second}=", f"{first + second}\n"
        text = torch.tensor(list((question + answer).encode()))
        inputs[row, : len(text)] = text
        targets[row, len(question) - 1 : len(text) - 1] = text[len(question) :]
    held_out = count // 10
    train = InMemory(inputs[held_out:], targets[held_out:])
    validation = InMemory(inputs[:held_out], targets[:held_out])
    return Source(train, validation, shape=(LENGTH,), classes=VOCABULARY)
