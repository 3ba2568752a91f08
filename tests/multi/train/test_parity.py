"""The same training written by hand in plain PyTorch: equal losses, norms and accuracy.

All of the step is written out: the mean loss, the schedule, the clip, the update, the evaluation.
Only the initial weights and the order of the samples are rollcall's.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from ranks import logged_steps, train
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from rollcall.config import parse
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.train.data.order import Order
from rollcall.train.models.cnn import cnn
from rollcall.train.weights.deferred import Draws

BATCH, STEPS, RATE, WARMUP, DECAY, CLIP = 100, 40, 3e-3, 5, 0.01, 1.0
WORDS = ["digits", f"data.global_batch={BATCH}", f"train.steps={STEPS}", f"optim.lr={RATE}"]
WORDS += ["train.evaluate_every=null", "log.every=1", "optim.schedule=cosine"]
WORDS += [f"optim.weight_decay={DECAY}", f"optim.warmup_steps={WARMUP}", f"optim.clip_norm={CLIP}"]
TOLERANCE = 2e-6  # relative: two ranks add in another order than one process, over 40 steps


class Digits:
    """What the model's builder asks of the data."""

    shape, classes = (1, 8, 8), 10


def by_hand() -> tuple[list[float], list[float], float, float]:
    """The losses and norms of all steps, and loss and accuracy at the end."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    held_out = torch.arange(len(labels)) % 5 == 4
    order = Order(int((~held_out).sum()), STEPS * BATCH, BATCH, seed=0)
    _, config = parse(WORDS)
    with Draws(0):
        model: nn.Module = cnn(config.model, Digits)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    losses, norms = [], []
    for step in range(STEPS):
        samples, _ = order.samples(step, range(BATCH))
        rows = torch.tensor(samples)
        loss = functional.cross_entropy(model(images[~held_out][rows]), labels[~held_out][rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        progress = (step - WARMUP) / (STEPS - WARMUP)
        fall = 0.5 * (1 + math.cos(math.pi * progress))
        optimizer.param_groups[0]["lr"] = RATE * ((step + 1) / WARMUP if step < WARMUP else fall)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        outputs = model(images[held_out])
    right = (outputs.argmax(-1) == labels[held_out]).float().mean().item()
    return losses, norms, functional.cross_entropy(outputs, labels[held_out]).item(), right


def test_two_ranks_train_what_plain_pytorch_trains(tmp_path: Path) -> None:
    losses, norms, loss, accuracy = by_hand()
    train(2, [*WORDS, f"run.root={tmp_path}", "run.name=ours"], tmp_path / "logs")
    run_dir = RunDir(tmp_path, "ours")
    lines = logged_steps(run_dir)
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=TOLERANCE)
    assert [line["grad_norm"] for line in lines] == pytest.approx(norms, rel=1e-4)
    [ours] = [line for line in read_lines(run_dir.events) if line["event"] == "evaluated"]
    assert ours["loss"] == pytest.approx(loss, rel=TOLERANCE)
    assert ours["accuracy"] == pytest.approx(accuracy, rel=TOLERANCE)
