"""Data, models and losses such as users write, with faults that one bad sample triggers."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import IterableDataset

from rollcall import Experts
from rollcall.config.schema import Data, Model
from rollcall.train.data.sets.text import text
from rollcall.train.data.source import Batch, BatchDataset, InMemory, Source
from rollcall.train.models.cnn import cnn
from rollcall.train.models.gpt import Block, gpt
from rollcall.train.ranks import agreement
from rollcall.train.ranks.world import World

if "SPACING" in os.environ:
    agreement.SPACING = float(os.environ["SPACING"])
Fault = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SIZE = 96
BRIGHT = 0.255
"""The mean of an image from which on `sometimes` does not use its additional layer."""
BAD = 40
"""The number of the bad sample."""


def with_batchnorm(_: Model, source: Source) -> nn.Module:
    """Convolutions with BatchNorm, without a bias, which would only collect rounding errors."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(8 * 16, source.classes),
    )


def smooth(_: Model, source: Source) -> nn.Module:
    """A network for digits whose gradient is continuous."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 64),
        nn.Tanh(),
        nn.Linear(64, source.classes),
    )


def gated(config: Model, source: Source) -> nn.Module:
    """The small cnn, slowed down by GATE=NUMBER:SECONDS:FILE in the environment.

    From forward pass NUMBER on, each pass waits up to SECONDS until FILE exists. So a test can act
    in the middle of a run, no matter how fast the machine is.
    """
    model = cnn(config, source)
    passes = itertools.count(1)
    number, seconds, file = os.environ.get("GATE", "0:0:").split(":", 2)

    def wait(*_: Any) -> None:
        end = time.monotonic() + float(seconds) * (next(passes) >= int(number))
        while not Path(file).exists() and time.monotonic() < end:
            time.sleep(0.01)

    model.register_forward_pre_hook(wait)
    return model


def gated_and_noisy(config: Model, source: Source) -> nn.Module:
    """The same, with noise from the generators of Python and NumPy."""

    def add_noise(_: nn.Module, __: Any, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 1e-3 * random.random() + 1e-3 * np.random.random())

    model = gated(config, source)
    model.register_forward_hook(add_noise)
    return model


def numbered_samples(_: Data, _world: World) -> Source:
    """Samples whose first value is their number divided by 1000."""
    inputs = torch.randn(SIZE + 24, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    inputs[:, 0, 0, 0] = torch.arange(SIZE + 24) / 1000
    rows = InMemory(inputs, torch.arange(SIZE + 24) % 10)
    return Source(rows, InMemory(inputs[SIZE:], rows.targets[SIZE:]), SIZE, 24, (1, 8, 8), 10)


def unvalidated(config: Data, world: World) -> Source:
    """The same without samples for a validation."""
    source = numbered_samples(config, world)
    none = InMemory(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64))
    return replace(source, validation=none, validation_size=0)


def streamed(_: Data, _world: World) -> Source:
    """The same as streams."""

    class Rows(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from ((torch.zeros(1, 8, 8), number % 10) for number in range(SIZE))

    return Source(Rows(), Rows(), shape=(1, 8, 8), classes=10)


def in_a_dictionary(config: Model, source: Source) -> nn.Module:
    """A model whose outputs are not one tensor."""
    model = cnn(config, source)
    model.register_forward_hook(lambda *call: {"logits": call[-1]})
    return model


def one_ignored(config: Data, world: World) -> Source:
    """The same; the target of the bad sample does not count."""
    source = numbered_samples(config, world)
    source.train.targets[BAD] = -100  # type: ignore[attr-defined]
    return source


def regression(_: Data, _world: World) -> Source:
    """A regression in which the bad sample has an extreme target."""
    inputs = torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(1))
    targets = inputs.sum(1, keepdim=True)
    rows = InMemory(inputs, targets.clone())
    rows.targets[BAD] = 1e4
    return Source(rows, InMemory(inputs[:24], targets[:24]), SIZE, 24, (4,), 1)


class Gaps(BatchDataset):
    """Sequences of which an uneven number of the first targets does not count, in some all."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole

    def __len__(self) -> int:
        return len(self._whole)

    def __getitems__(self, indices: list[int]) -> Batch:
        batch: Batch = self._whole.__getitems__(indices)
        targets = batch.targets.clone()
        for row, index in enumerate(indices):
            targets[row, : index * 37 % (targets.shape[1] + 1)] = -100
        return batch._replace(targets=targets)


def gaps(config: Data, world: World) -> Source:
    """Text with targets that do not count."""
    source = text(config, world)
    return replace(source, train=Gaps(source.train), validation=Gaps(source.validation))


def token_losses(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of the tokens that count, and how many they are."""
    losses = functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
    return losses.sum(1), (targets >= 0).sum(1)


def half_masked(_: Data, _world: World) -> Source:
    """Sequences of which half of the targets count."""
    drawn = torch.Generator().manual_seed(1)
    inputs = torch.randint(0, 11, (SIZE, 12), generator=drawn)
    targets = inputs.masked_fill(torch.rand(SIZE, 12, generator=drawn) < 0.5, -100)
    split = InMemory(inputs, targets)
    return Source(split, split, shape=(12,), classes=11)


class Penalized(nn.Module):
    """A layer of experts with both losses of its router."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.experts = Experts(8, 8, 4, balance_loss=0.3, z_loss=0.3, balance_rate=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map tokens to scores."""
        return self.head(self.tokens(x) + self.experts(self.tokens(x)))  # type: ignore[no-any-return]


def odd(config: Model, source: Source) -> nn.Module:
    """A transformer with weights that the loss does not use, frozen ones and shared ones.

    Every layer has some, so that a pipeline can divide it.
    """
    model = gpt(config, source)
    model.embedding.requires_grad_(False)
    for name, block in model.named_children():
        if isinstance(block, Block):
            block.unused = nn.Linear(3, 3)
            block.perceptron_norm.weight = block.attention_norm.weight
            block.attention.key.requires_grad_(name != "block1")
    return model


def tied(config: Model, source: Source) -> nn.Module:
    """The same, and the head has the weights of the embedding."""
    model = odd(config, source)
    head, embedding = model.get_submodule("head"), model.get_parameter("embedding.weight")
    head.weight = embedding.requires_grad_()
    return model


class Sometimes(nn.Module):
    """A cnn with a layer that only some images use: the others do not reach it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.extra = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        y: torch.Tensor = self.inner(x)
        chosen = x.mean((1, 2, 3)) < BRIGHT
        return y + self.extra(y) * chosen[:, None] if chosen.any() else y


def sometimes(config: Model, source: Source) -> nn.Module:
    """The small cnn, with a layer that is not used in every step."""
    return Sometimes(cnn(config, source))


class Guard(nn.Module):
    """Applies a fault to training batches that contain the bad sample."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self._fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the batch, with the fault if it contains the bad sample."""
        y = x + self.shift
        bad = (x[:, 0, 0, 0] * 1000).round() == BAD
        return self._fault(y, bad) if self.training and bad.any() else y


def _guarded(fault: Fault) -> nn.Sequential:
    layers = [nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)]
    return nn.Sequential(Guard(fault), *layers)


def healthy(_: Model, _source: Source) -> nn.Module:
    """The same model as those with a fault below, without a fault."""
    return _guarded(lambda x, _: x)


def nan_output(_: Model, _source: Source) -> nn.Module:
    """The output of the first layer is NaN for the bad sample."""
    return _guarded(lambda x, bad: x.masked_fill(bad.view(-1, 1, 1, 1), torch.nan))


QUIET = range(40, 80)
"""Forward passes of a training between which `counted` counts."""


def counted(config: Model, source: Source) -> nn.Module:
    """A perceptron that writes what its steps cost, in numbers that depend on no machine.

    The file COUNTS.RANK gets the calls of rollcall's functions in a step of QUIET, the calls of all
    functions in Python (torch's differ by version), and the collectives of a later step. System
    calls lie between two calls of `stat` for `/QUIET`.
    """
    from collectives import Collectives  # here: it is not there for those who import us from above

    model = healthy(config, source)
    passes, collectives = itertools.count(), Collectives()
    calls = {"calls": 0, "of Python": 0}
    own = str(Path(__file__).parents[2])

    def see(frame: Any, event: str, _arg: Any) -> None:
        if event == "call":
            calls["of Python"] += 1
            calls["calls"] += frame.f_code.co_filename.startswith(own)

    def note(module: nn.Module, _: Any) -> None:
        number = next(passes) if module.training else -1
        if number in (QUIET.start, QUIET.stop):
            Path("/QUIET").exists()
        if "COUNTS" not in os.environ:
            return
        if number == QUIET.start:
            sys.setprofile(see)
        elif number == QUIET.stop:  # not at once: a mode makes further calls
            sys.setprofile(None)
            collectives.__enter__()  # type: ignore[no-untyped-call]
        elif number == QUIET.stop + len(QUIET):
            collectives.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            found = {**calls, **collectives.counts}
            file = Path(f"{os.environ['COUNTS']}.{os.environ['RANK']}")
            file.write_text(json.dumps({name: n / len(QUIET) for name, n in found.items()}))

    model.register_forward_pre_hook(note)
    return model


def infinite_gradient(_: Model, _source: Source) -> nn.Module:
    """The gradient of the bad sample is infinite."""

    def fault(x: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        return x + (x * 0).sqrt() * bad.view(-1, 1, 1, 1)

    return _guarded(fault)


def out_of_memory(_: Model, _source: Source) -> nn.Module:
    """The forward pass fails on more than two samples if the bad one is among them."""

    def fault(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        if len(x) > 2:
            torch.empty(1 << 50, device=x.device)  # an allocation that always fails
        return x

    return _guarded(fault)


def out_of_memory_in_evaluation(config: Model, source: Source) -> nn.Module:
    """The forward pass fails on more than two samples in evaluation mode."""

    def fault(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if len(inputs[0]) > 2 and not module.training:
            torch.empty(1 << 50)

    model = healthy(config, source)
    model.register_forward_pre_hook(fault)
    return model


def out_of_memory_in_backward(_: Model, _source: Source) -> nn.Module:
    """The backward pass fails on more than four samples, after the gradient of the last layer."""

    def fault(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        middle.fails = len(x) > 4
        return x

    middle = _OutOfMemory()
    return nn.Sequential(Guard(fault), nn.Flatten(), nn.Linear(64, 16), middle, nn.Linear(16, 10))


class _OutOfMemory(nn.Module):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ReLU; let the backward pass fail if asked to."""
        fails, self.fails = self.fails, False
        out: torch.Tensor = _NoMemory.apply(x, fails)
        return out


class _NoMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.fails = fails
        return x.relu()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.fails:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return gradients[0] * (ctx.saved_tensors[0] > 0), None


class _Planned(nn.Sequential):
    tensor_plan: ClassVar[Any] = {"2": "columns", "4": "rows"}


def diverging_copy(_: Model, _source: Source) -> nn.Module:
    """A weight that all ranks of a tensor group hold changes on rank 0 alone."""

    def fault(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            last.weight[3, 5] += 1e-3 * (os.environ["RANK"] == "0")
        return x

    last = nn.Linear(16, 10)
    layers = [nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16)]
    return _Planned(Guard(fault), *layers, last)


def diverging_replica(_: Model, _source: Source) -> nn.Module:
    """One weight changes on rank 0 alone when it sees the bad sample."""

    def fault(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            last.weight[3, 5] += 1e-3 * (os.environ["RANK"] == "0")
        return x

    last = nn.Linear(16, 10)
    return nn.Sequential(Guard(fault), nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), last)


def large_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy whose gradient overflows in fp16 with the first loss scales."""
    return functional.cross_entropy(outputs, targets, reduction="none") * 3000


def mean_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that wrongly returns one number for the whole batch."""
    return functional.cross_entropy(outputs, targets)


MASKS: list[tuple[str, list[int], int]] = []
"""Of each call of `Dropout` on this rank in training: its name, shape and a checksum."""


class Dropout(nn.Dropout):
    """Dropout that records its masks."""

    def __init__(self, p: float, name: str = "") -> None:
        super().__init__(p)
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input times the mask."""
        mask = super().forward(torch.ones_like(x))
        if self.training:
            MASKS.append((self.name, list(x.shape), zlib.crc32(mask.detach().numpy().tobytes())))
        return x * mask


def with_dropout(config: Model, source: Source) -> nn.Module:
    """The small gpt with dropout also before the first block and after each block."""
    model = gpt(config, source)
    first = Dropout(config.dropout, "embedding")
    model.get_submodule("block0").register_forward_pre_hook(
        lambda layer, inputs: first.train(layer.training)(*inputs)
    )
    for name, layer in model.named_children():
        dropout = Dropout(config.dropout)
        dropout.name = name
        if name.startswith("block"):
            layer.register_forward_hook(
                lambda layer, _, x, dropout=dropout: dropout.train(layer.training)(x)
            )
            layer.dropout = Dropout(config.dropout)
            layer.dropout.name = f"{name}.hidden"
    return model


def _drop(dropout: Dropout, layer: nn.Module, _: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = dropout.train(layer.training)(x)
    return out


def own_positions(config: Model, source: Source) -> nn.Module:
    """A model whose position ids nobody else can set."""
    return _named(OwnPositions(config, source))


def unshifted(config: Data, world: World) -> Source:
    """The data set text, as if a loss had to shift its targets."""
    return replace(text(config, world), is_shifted=False)


def asked_positions(config: Model, source: Source) -> nn.Module:
    """A model whose position ids the caller can set."""
    return _named(AskedPositions(config, source))


def mixed_units(config: Model, source: Source) -> nn.Module:
    """A model that mixes all units between the layers of its plan."""
    model = asked_positions(config, source)
    for name, layer in model.named_modules():
        if name.endswith("hidden_dropout"):
            layer.register_forward_hook(lambda _, __, x: x.softmax(-1))
    return model


def seeded_by_rank(config: Model, source: Source) -> nn.Module:
    """A model with its own generator, seeded by the rank."""
    model = asked_positions(config, source)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))

    def drop(layer: nn.Module, _: Any, x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(x.shape, generator=generator) > 0.1
        return x * kept if layer.training else x

    model.get_submodule("dropout").register_forward_hook(drop)
    return model


def _named(model: nn.Module) -> nn.Module:
    for name, layer in model.named_modules():
        if isinstance(layer, Dropout):
            layer.name = name
    return model


class OwnPositions(nn.Module):
    """A transformer that makes its own position ids, like Hugging Face's."""

    tensor_plan: ClassVar[Any] = {"blocks.*.up": "columns", "blocks.*.down": "rows"}
    context_plan: ClassVar[Any] = {}

    def __init__(self, config: Model, source: Source) -> None:
        super().__init__()
        width = config.hidden_size
        self.embedding = nn.Embedding(source.classes, width)
        self.positions = nn.Embedding(source.shape[0], width)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.head = nn.Linear(width, source.classes)

    def embed(self, tokens: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        """Embed tokens, numbered from 0 unless their places are given."""
        if places is None:
            places = torch.arange(tokens.shape[1])
        out: torch.Tensor = self.dropout(self.embedding(tokens) + self.positions(places))
        return out

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (rows, length) to (rows, length, classes)."""
        return self._rest(self.embed(tokens))

    def _rest(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


class AskedPositions(OwnPositions):
    """The same, but the caller may say which positions the tokens have."""

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Map (rows, length) to (rows, length, classes)."""
        return self._rest(self.embed(tokens, position_ids))


class _Stack(nn.Module):
    """Four experts of a user's own, one in each row of the weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, width, 24) * width**-0.5)
        self.down = nn.Parameter(torch.randn(4, 24, width) * 24**-0.5)
        self.register_parameter("bias", None)

    def forward(
        self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for number in range(len(self.up)):
            assert self.bias is None
            share = (weights * (chosen == number)).sum(1, keepdim=True)
            out = out + functional.relu(tokens @ self.up[number]) @ self.down[number] * share
        return out


class _Mixture(nn.Module):
    """Two of four experts for each token: at first the same two, so that some ranks have none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        nn.init.zeros_(self.router.weight)
        self.stacks = nn.ModuleList([_Stack(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).sigmoid().topk(2)
        out: torch.Tensor = self.stacks[0](tokens, chosen, weights).view_as(x)
        return out


def stacked(config: Model, source: Source) -> nn.Module:
    """Return a transformer whose blocks have such mixtures."""
    model = gpt(config, source)
    for block in model.children():
        if isinstance(block, Block):
            block.experts = _Mixture(config.hidden_size)  # type: ignore[assignment]
            del block.up, block.down
    vars(model).update(tensor_plan={}, expert_plan=["*.stacks.*"])
    return model


class _Block(nn.Module):
    def __init__(self, config: Model) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.num_heads
        self.norm = nn.RMSNorm(width)
        self.mixer = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 2 * width)
        self.hidden_dropout = Dropout(config.dropout)
        self.down = nn.Linear(2 * width, width)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and a perceptron, with dropout within and after it."""
        rows, length, _ = x.shape
        parts = self.mixer(self.norm(x)).view(rows, length, 3, self.heads, -1).transpose(1, 3)
        query, key, value = parts.unbind(2)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(mixed.transpose(1, 2).flatten(-2))
        hidden = self.hidden_dropout(functional.gelu(self.up(x)))
        out: torch.Tensor = x + self.dropout(self.down(hidden))
        return out
