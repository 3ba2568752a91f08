"""Pieces of the random models of `random_models.py`: layers as people write them, and odd ones.

A piece gets rows of WIDTH numbers and returns as many. Each must train on several ranks as in a
plain loop, or be refused or announced.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils import checkpoint

WIDTH = 8


class Piece(nn.Module):
    """A part of a model; outputs have the shape of inputs."""

    inner: Any

    def __init__(self, _chance: random.Random) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        out: torch.Tensor = self.inner(x)
        return out.tanh()


class Residual(Piece):
    """Two layers beside a sum, which a tensor plan can split."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.inner, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(super().forward(x))


class Split(Residual):
    """The same with a norm of the features that may be split."""

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(functional.layer_norm(self.inner(x), (self.inner(x).shape[-1],)))


class Norm(Piece):
    """A norm of each sample."""

    def __init__(self, _chance: random.Random) -> None:
        nn.Module.__init__(self)
        self.inner = nn.LayerNorm(WIDTH)


class Parametrized(Piece):
    """A weight that is computed from others."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        kinds: list[Callable[..., nn.Module]] = [
            *(parametrizations.spectral_norm, parametrizations.weight_norm),
            parametrizations.orthogonal,
        ]
        self.inner = chance.choice(kinds)(self.inner)


class Odd(Piece):
    """Weights that FSDP2 does not shard."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        kinds = {
            "scalar": torch.tensor(1.3),
            "complex": torch.complex(torch.linspace(0, 1, WIDTH), torch.ones(WIDTH)),
            "transposed": torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).t(),
            "double": torch.linspace(1, 2, WIDTH).double(),
        }
        self.kind = chance.choice([*kinds])
        self.odd = nn.Parameter(kinds[self.kind])

    def forward(self, x: torch.Tensor) -> Any:
        if self.kind == "complex":
            return super().forward(torch.view_as_real(x * self.odd).sum(-1))
        if self.kind == "transposed":
            return super().forward(x @ self.odd @ self.odd.t() / 3)
        return super().forward(x * self.odd.float())


class Twice(Piece):
    """A layer that is used twice."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(super().forward(x))


class Tied(Piece):
    """Two layers of one weight."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.other(super().forward(x))


class Outside(Piece):
    """Uses the weight of a layer that it does not call."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.other: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) + functional.linear(x, self.other[0].weight)


class Frozen(Piece):
    """Does not train one of its weights."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.inner.weight.requires_grad_(False)


class Masked(Piece):
    """Changes a gradient by a hook."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.inner.weight.register_hook(_tenth)


def _tenth(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.1


class Unused(Piece):
    """Has a layer that no step uses."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.spare = nn.Linear(WIDTH, WIDTH)


class Alternating(Piece):
    """Uses a layer in every second step."""

    calls = 0

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += self.training
        out = super().forward(x)
        return out + self.second(x) if self.calls % 2 else out


class Heads(Piece):
    """Each sample chooses a layer."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(chance.choice([2, 3])))

    def forward(self, x: torch.Tensor) -> Any:
        x = super().forward(x)
        chosen = (x.detach().sum(1) * 10).long() % len(self.heads)
        out = torch.zeros_like(x)
        for number in sorted({*chosen.tolist()}):
            out[chosen == number] = self.heads[number](x[chosen == number])
        return x + out


class Rare(Piece):
    """Uses a layer for rare samples alone."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.rare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        out, is_rare = super().forward(x), x[:, :1] > 1
        return out + torch.where(is_rare, self.rare(x), 0) if is_rare.any() else out


class Centered(Piece):
    """Subtracts a running mean."""

    mean: torch.Tensor

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x - self.mean)
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.2)
        return out


class Counting(Piece):
    """Counts its passes: in a buffer, in one that it replaces, in Python, or in a list."""

    count: torch.Tensor

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.kind = chance.choice(["buffer", "replaced", "python", "list", "samples"])
        self.register_buffer("count", torch.zeros(()))
        self.number, self.list = 0, [0]

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.number += self.kind == "python"
            self.list[0] += self.kind == "list"
            if self.kind == "buffer":
                self.count.add_(1)
            elif self.kind == "replaced":
                self.count = self.count + 1
            elif self.kind == "samples":
                self.count += len(x) / 8
        return super().forward(x) * (1 + (self.count + self.number + self.list[0]) / 10)


class Mode(Piece):
    """Computes something else in training."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * (0.5 if self.training else 1)


class Deviation(Piece):
    """Depends on the other samples of a batch."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) + x.std(0, unbiased=False).mean()


class InPlace(Piece):
    """Changes what it gets in place, at the start of a model its inputs."""

    def forward(self, x: torch.Tensor) -> Any:
        x = x.clone() if x.requires_grad else x  # a backward pass may need it
        with torch.no_grad():
            x.mul_(1.1)
        return super().forward(x)


class Recomputed(Piece):
    """Recomputes its activations."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.reentrant = chance.random() < 0.5

    def forward(self, x: torch.Tensor) -> Any:
        whole: torch.Tensor = checkpoint.checkpoint(
            super().forward, x, use_reentrant=self.reentrant
        )
        return whole


class Recurrent(Piece):
    """A recurrent layer over the features."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.rnn = nn.GRU(1, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        hidden, _ = self.rnn(x.unsqueeze(-1))
        return super().forward(x) + hidden.mean(-1)


class Momentum(Piece):
    """A teacher that follows a layer, as a copy that is not trained."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.inner.weight, 0.1)
        return super().forward(x) + self.teacher(x)


class Convolved(Piece):
    """A convolution with weights in an odd layout, and a norm of groups."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.conv: nn.Module = nn.Conv2d(2, 4, 2, padding=1)
        if chance.random() < 0.5:
            self.conv = self.conv.to(memory_format=torch.channels_last)
        self.norm, self.pool = nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d((1, 2))

    def forward(self, x: torch.Tensor) -> Any:
        image = self.norm(self.conv(x.view(-1, 2, 2, 2)))
        return super().forward(x) + self.pool(image).flatten(1)


class Attentive(Piece):
    """A layer of a transformer, which an evaluation computes in one operation of its own."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        first = chance.random() < 0.5
        self.inner = nn.TransformerEncoderLayer(
            4, 2, 8, dropout=0.0, batch_first=True, norm_first=first
        )

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.view(-1, 2, 4)).flatten(1)


class Memory(Piece):
    """A recurrent layer of several weights, or a cell that is called in a loop."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        kinds: list[Callable[[], nn.Module]] = [
            lambda: nn.LSTM(2, 4, batch_first=True, bidirectional=True, num_layers=2),
            lambda: nn.LSTM(2, 4, batch_first=True, proj_size=2),
            lambda: nn.RNN(2, 4, batch_first=True),
            lambda: nn.GRUCell(2, 4),
        ]
        self.rnn = chance.choice(kinds)()

    def forward(self, x: torch.Tensor) -> Any:
        steps = x.view(-1, 4, 2)
        if isinstance(self.rnn, nn.GRUCell):
            state = torch.zeros(len(x), 4)
            for number in range(4):
                state = self.rnn(steps[:, number], state)
            return super().forward(x) + state.mean(1, keepdim=True)
        return super().forward(x) + self.rnn(steps)[0].mean((1, 2))[:, None]


class Mapped(Piece):
    """Calls its layer as a function of each sample's, with torch.func."""

    def forward(self, x: torch.Tensor) -> Any:
        weights = dict(self.inner.named_parameters())

        def one_sample(row: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = torch.func.functional_call(self.inner, weights, (row,))
            return out.tanh()

        return torch.func.vmap(one_sample)(x)


class Ensemble(Piece):
    """Stacks the weights of several layers, and computes all of them at once."""

    def __init__(self, _chance: random.Random) -> None:
        nn.Module.__init__(self)
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        weights = torch.stack([layer.weight for layer in self.inner])
        biases = torch.stack([layer.bias for layer in self.inner])
        return (torch.einsum("bi,eoi->beo", x, weights) + biases).mean(1).tanh()


class Reversal(torch.autograd.Function):
    """The identity, with a gradient of the opposite sign."""

    @staticmethod
    def forward(_context: Any, x: torch.Tensor, _weight: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *slopes: Any) -> Any:
        return -0.3 * slopes[0], slopes[0].sum(0)


class Reversed(Piece):
    """Reverses its gradient by a function of the user's, which also gives a weight one."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return x + Reversal.apply(super().forward(x), self.bias) + self.bias.detach()


class Quantized(Piece):
    """Rounds its weight with a learned or a fixed scale, and lets the gradient through."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.scale = nn.Parameter(torch.tensor([0.05]))
        self.zero = nn.Parameter(torch.tensor([0.0]))
        self.learns = chance.random() < 0.5

    def forward(self, x: torch.Tensor) -> Any:
        weight = self.inner.weight
        if self.learns:
            rounded = torch._fake_quantize_learnable_per_tensor_affine(
                weight, self.scale, self.zero, -8, 7, 0.1
            )
        else:
            rounded = weight + ((weight / 0.05).round() * 0.05 - weight).detach()
        return functional.linear(x, rounded, self.inner.bias).tanh()


class Listed(Piece):
    """Weights in a list and in a dictionary, used in another order than they have there."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.list = nn.ParameterList(torch.full((WIDTH,), n / 4) for n in range(1, 4))
        self.dict = nn.ParameterDict({"b": torch.ones(1), "a": torch.ones(3, 1)})

    def forward(self, x: torch.Tensor) -> Any:
        x = super().forward(x * self.list[2] * self.dict["a"].mean())
        return x * self.list[0] + self.list[1] * self.dict["b"]


class Old(Piece):
    """A weight that is computed before each call by the old functions of torch."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        kinds: list[Callable[[nn.Linear], nn.Module]]
        kinds = [nn.utils.weight_norm, nn.utils.spectral_norm]
        kinds.append(lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3))  # type: ignore[no-untyped-call]
        self.inner = chance.choice(kinds)(self.inner)


class Hooked(Piece):
    """Hooks in both directions, of modules and of what they compute."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.inner.register_forward_pre_hook(lambda _module, given: (given[0] * 1.1,))
        self.inner.register_forward_hook(lambda _module, _given, out: out + 0.1)
        self.inner.register_full_backward_hook(_half)

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(_tenth)
        return out


def _half(_module: nn.Module, slopes: Any, _of_outputs: Any) -> Any:
    return tuple(None if slope is None else slope * 0.5 for slope in slopes)


class Penalized(Piece):
    """Computes with its own slopes."""

    def forward(self, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            start = x if x.requires_grad else x.detach().requires_grad_()
            out = super().forward(start)
            (slopes,) = torch.autograd.grad(out.sum(), start, create_graph=True)
        return out + 0.1 * slopes


class Single(Piece):
    """Computes sample after sample."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.stack([super(Single, self).forward(row) for row in x])


class Deep(Piece):
    """Uses its layer as often as the samples need."""

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        for depth in range(3):
            is_active = x.detach().abs().amax(1, keepdim=True) > 1.5 + depth / 2
            if not is_active.any():
                break
            out = torch.where(is_active, super().forward(out), out)
        return out


class Aliased(Piece):
    """Has the memory of a weight also as a buffer, in a list, or as a view."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.kind = chance.choice(["buffer", "temporary", "list", "view"])
        alias = self.inner.weight.data
        if self.kind in ("buffer", "temporary"):
            self.register_buffer("alias", alias, persistent=self.kind == "buffer")
        elif self.kind == "list":
            self.alias = [self.inner.weight]
        else:
            self.alias = alias.view(-1)

    def forward(self, x: torch.Tensor) -> Any:
        alias: Any = self.alias
        weight = alias[0].detach() if isinstance(alias, list) else alias
        return super().forward(x) + functional.linear(x, weight.view(WIDTH, WIDTH)) / 4


class Direct(Piece):
    """Calls the forward method or another method of its layer itself."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.inner = _Doubled(WIDTH, WIDTH)
        self.is_named = chance.random() < 0.5

    def forward(self, x: torch.Tensor) -> Any:
        method = self.inner.doubled if self.is_named else self.inner.forward
        return method(x).tanh()


class _Doubled(nn.Linear):
    def doubled(self, x: torch.Tensor) -> Any:
        return 2 * self(x)


class Embedded(Piece):
    """An embedding by the largest feature: with sparse gradients, a norm, or neither."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        kinds: list[dict[str, Any]] = [{}, {"sparse": True}, {"max_norm": 1.0}, {"padding_idx": 0}]
        kinds.append({"scale_grad_by_freq": True})
        self.words = nn.Embedding(WIDTH, WIDTH, **chance.choice(kinds))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) + self.words(x.detach().argmax(1))


class Initialized(Piece):
    """Chooses a scale by the first samples that it sees, as ActNorm does."""

    has_seen: torch.Tensor

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("has_seen", torch.zeros((), dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> Any:
        if self.training and not self.has_seen:
            self.scale.data.copy_(1 / (1 + x.detach().abs().mean(0)))
            self.has_seen.fill_(True)
        return super().forward(x * self.scale)


class Clipped(Piece):
    """Limits its weights before it uses them, as critics do."""

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.inner.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)


class Freezing(Piece):
    """Stops training a layer after some passes."""

    passes: torch.Tensor

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.passes.add_(1)
        if self.passes.item() > 3:
            self.second.requires_grad_(False)
        return super().forward(x) + self.second(x)


@dataclass
class Named:
    """The outputs of a layer by their names."""

    out: torch.Tensor
    extra: dict[str, Any]


class _Naming(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return Named(out, {"square": [out * out], "text": "none"})


class Structured(Piece):
    """A layer that returns an object."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.inner = _Naming(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        named = self.inner(x)
        return named.out.tanh() + 0.1 * named.extra["square"][0]


class Stopped(Piece):
    """Lets no gradient through one of two layers, or computes a third without any."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.second, self.third = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            fixed = self.third(x)
        return super().forward(x) + self.second(x.detach()) + fixed


class Temporary(Piece):
    """Buffers that no checkpoint holds: a constant, or a count."""

    table: torch.Tensor

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.register_buffer("table", torch.linspace(0, 1, WIDTH), persistent=False)
        self.counts = chance.random() < 0.3

    def forward(self, x: torch.Tensor) -> Any:
        if self.counts and self.training:
            self.table.add_(0.1)
        return super().forward(x) * self.table


class Bank(Piece):
    """Remembers the newest samples, and adds what is near among them."""

    queue: torch.Tensor
    first: torch.Tensor

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.register_buffer("queue", torch.zeros(12, WIDTH))
        self.register_buffer("first", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        queue = self.queue.clone()
        near = (out @ queue.t()).softmax(1) @ queue
        if self.training:
            places = (int(self.first) + torch.arange(len(x))) % len(self.queue)
            self.queue[places] = out.detach()
            self.first.copy_((self.first + len(x)) % len(self.queue))
        return out + near


class Nested(Piece):
    """Computes with samples of different lengths in a nested tensor."""

    def forward(self, x: torch.Tensor) -> Any:
        rows = torch.nested.nested_tensor_from_jagged(
            x.reshape(-1, WIDTH), torch.arange(0, len(x) + 1)
        )
        return self.inner(rows).values().tanh()


class Late(Piece):
    """A layer that gets its size, and its weights, from the first samples."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.inner = nn.LazyLinear(WIDTH)


class Small(Piece):
    """Weights with fewer rows than ranks, without any, or of integers."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.row, self.empty = nn.Parameter(torch.ones(1, WIDTH)), nn.Parameter(torch.empty(0, 3))
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x * self.row)[:, self.order] + self.empty.sum()


class Half(Piece):
    """A weight in another precision than the others."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.scale = nn.Parameter(torch.linspace(0.5, 1, WIDTH).bfloat16())

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.scale.float()


class Turning(Piece):
    """Uses one of two layers, in turn, by a buffer."""

    passes: torch.Tensor

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.passes += 1
        out = super().forward(x)
        return out + self.second(x) if int(self.passes) % 2 else out


class Balanced(Piece):
    """Experts that are mixed, with a further loss that `auxiliary` in the models adds."""

    extra: Any = 0.0

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        shares = self.gate(x).softmax(1)
        self.extra = shares.square().sum()
        return x + sum(shares[:, n : n + 1] * e(x) for n, e in enumerate(self.experts))


PLAIN: list[type[Piece]] = [Piece, Residual, Norm]
PIECES: list[type[Piece]] = [
    *(*PLAIN, Split, Parametrized, Odd, Twice, Tied, Outside, Frozen, Masked, Unused, Alternating),
    *(Heads, Rare, Centered, Counting, Mode, Deviation, InPlace, Recomputed, Recurrent, Momentum),
    *(Convolved, Attentive, Memory, Mapped, Ensemble, Reversed, Quantized, Listed, Old, Hooked),
    *(Penalized, Single, Deep, Aliased, Direct, Embedded, Initialized, Clipped, Freezing, Small),
    *(Structured, Stopped, Temporary, Bank, Nested, Late, Half, Turning, Balanced),
]
