"""Models and losses that train something else when they are spread, unless somebody notices."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils import checkpoint

from rollcall.train.data.order import Order
from rollcall.train.data.source import InMemory, Source

CLASSES, WIDTH, LENGTH, WORDS = 5, 12, 8, 40
ROWS = 64


def vectors() -> Source:
    """Random vectors whose class depends on them."""
    x, y = vectors_by_hand()
    return Source(InMemory(x, y), InMemory(x[:0], y[:0]), shape=(WIDTH,), classes=CLASSES)


def vectors_by_hand() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(7)
    x = torch.randn(ROWS, WIDTH, generator=drawn)
    return x, (x @ torch.randn(WIDTH, CLASSES, generator=drawn)).argmax(1)


def tokens() -> Source:
    """Random sequences of tokens, with a target for each."""
    drawn = torch.Generator().manual_seed(8)
    x = torch.randint(0, WORDS, (ROWS, LENGTH), generator=drawn)
    y = torch.randint(0, CLASSES, (ROWS, LENGTH), generator=drawn)
    return Source(InMemory(x, y), InMemory(x[:0], y[:0]), shape=(LENGTH,), classes=CLASSES)


class Net(nn.Module):
    """Two layers; subclasses do something between them."""

    tensor_plan: ClassVar[Any] = {"first": "columns", "last": "rows"}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.last(self.between(self.first(x).relu()))
        return logits

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the last layer gets."""
        return hidden


class Counted(Net):
    """Notes the samples of each pass, on the class, which no check puts back."""

    passes: ClassVar[list[int]] = []

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        if not hidden.is_meta:
            self.passes.append(len(hidden))
        return hidden


@dataclass
class Scores:
    """Outputs with logits, as models of Hugging Face return them."""

    logits: torch.Tensor
    hidden: torch.Tensor


class Scored(Net):
    """Returns an object."""

    def forward(self, x: torch.Tensor) -> Any:
        """Return the logits beside something else."""
        return Scores(super().forward(x), x)


def of_logits(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the losses of the logits, which are all that a loss gets."""
    assert isinstance(outputs, torch.Tensor), outputs
    return functional.cross_entropy(outputs, targets, reduction="none")


class Scales(Net):
    """Scales in training alone, which the layers of the pipeline leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 0.5 if self.training else hidden

    def pipeline_layers(self) -> dict[str, nn.Module]:
        """Return the layers without the scale."""
        return {"first": self.first, "relu": self.relu, "last": self.last}


class Halves(nn.ReLU):
    """Has a weight of 16 bits, and computes with 32."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1, 16).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale.float()


class HalfScales(Scales):
    """The same, beside a weight of 16 bits."""

    scales = True

    def __init__(self) -> None:
        super().__init__()
        self.relu = Halves()

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().between(self.relu(hidden)) if self.scales else self.relu(hidden)


class WithHalf(HalfScales):
    """The same without the scale, which trains."""

    scales = False


class Normalizes(Net):
    """Normalizes, in training alone, the features that tensor parallelism splits."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(hidden, hidden.shape[-1:]) if self.training else hidden


class Words(nn.Module):
    """Attention over a sequence."""

    context_plan: ClassVar[Any] = {}
    noise = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each token."""
        x = self.embedding(tokens)
        if self.noise:
            x = x + self.noise * torch.randn_like(x)
        if self.training:
            x = self.in_training(x)
        heads = x[:, None].expand(-1, 2, -1, -1)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        logits: torch.Tensor = self.head(mixed.mean(1))
        return logits

    def in_training(self, x: torch.Tensor) -> torch.Tensor:
        """Return the embeddings without the mean over the sequence."""
        return x - x.mean(1, keepdim=True)


class NoisyWords(Words):
    """The same, with random numbers."""

    noise = 0.1


class ExtraWords(Words):
    """Has a weight that an evaluation does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)

    def in_training(self, x: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of another layer."""
        y: torch.Tensor = self.extra(x)
        return y


class Spread(Net):
    """Appends the standard deviation over the batch, as discriminators do."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + hidden.std(0, unbiased=False).mean()


class Synchronized(Net):
    """Subtracts the mean over the samples of all ranks, whose gradient stays on each."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        mean = hidden.detach().mean(0)
        torch.distributed.all_reduce(mean)
        return hidden - mean / torch.distributed.get_world_size()


class Deviates(Net):
    """The same, with a deviation that one sample does not have."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input and the deviation."""
        return hidden + hidden.std(0).mean()


class Centers(Net):
    """Subtracts a running mean of what it sees in training."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        y = super().forward(x - self.mean)
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
        return y


class Narrow(Net):
    """Has memory for two samples, and subtracts their mean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        if len(x) > 2:
            raise torch.OutOfMemoryError("CPU out of memory: a third sample does not fit")
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x - x.mean(0))


class Counts(Net):
    """Adds up the numbers that it sees."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        y = super().forward(x * (1 + self.seen / 100))
        if self.training:
            self.seen = self.seen + self.counted(x)
        return y

    def counted(self, x: torch.Tensor) -> int | torch.Tensor:
        """Return what to add."""
        return len(x)


class Rare(Counts):
    """Adds up the samples of a kind, of which the first two of a run are not."""

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        """Return their number."""
        return (x[:, 0] < -1.5).sum()


class Codebook(Net):
    """Quantizes to the nearest of some codes, which follow the data by moving averages."""

    codes: torch.Tensor
    uses: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(6, 16))
        self.register_buffer("uses", torch.ones(6))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(hidden.detach(), self.codes).argmin(1)
        chosen = self.codes[nearest]
        if self.training:
            hot = functional.one_hot(nearest, 6).float()
            self.uses.mul_(0.9).add_(0.1 * hot.sum(0))
            self.codes.lerp_(hot.T @ hidden.detach() / self.uses[:, None], 0.1)
        return hidden + (chosen - hidden).detach()


class SharedCodebook(Net):
    """The codebook of VQ-VAE, by moving averages of sums that forward() adds up over the ranks."""

    cluster_size: torch.Tensor
    embed_avg: torch.Tensor
    embed: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("embed", torch.randn(6, 16))
        self.register_buffer("cluster_size", torch.zeros(6))
        self.register_buffer("embed_avg", self.embed.clone())

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(hidden.detach(), self.embed).argmin(1)
        chosen = self.embed[nearest]
        if self.training:
            hot = functional.one_hot(nearest, 6).float()
            counts, sums = hot.sum(0), hot.T @ hidden.detach()
            if dist.is_initialized():
                dist.all_reduce(counts)
                dist.all_reduce(sums)
            self.cluster_size.mul_(0.9).add_(counts, alpha=0.1)
            self.embed_avg.mul_(0.9).add_(sums, alpha=0.1)
            total = self.cluster_size.sum()
            sizes = (self.cluster_size + 1e-5) / (total + 6e-5) * total
            self.embed.copy_(self.embed_avg / sizes[:, None])
        return hidden + (chosen - hidden).detach()


class FirstCodebook(SharedCodebook):
    """The same, but all ranks take what the first has seen."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the codes."""
        out = super().between(hidden)
        dist.broadcast(self.embed_avg.add_(hidden.detach().mean()), 0)
        return out


class Block(nn.Module):
    """Adds a running count of its passes, in a buffer and in Python, to what it computes."""

    calls = 0
    passes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as much as came in."""
        self.passes.add_(1)
        self.calls += 1
        y: torch.Tensor = self.linear(x).tanh() * (1 + self.passes / 10 + self.calls / 20)
        return y


class Recurrent(Net):
    """Has a recurrent layer, which keeps its weights in a list too."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(1, 3, batch_first=True)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the features with a sum over them."""
        states, _ = self.recurrent(hidden.unsqueeze(-1))
        sums: torch.Tensor = hidden + states.mean(-1)
        return sums


class Following(Block):
    """The same, with a teacher that follows the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.teacher.weight.data.lerp_(self.linear.weight.data, 0.1)
        y: torch.Tensor = super().forward(x) + self.teacher(x)
        return y


class Replacing(Following):
    """The same, as MoCo does it: the weight gets other memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.teacher.weight
        weight.data = weight.data * 0.9 + self.linear.weight.data * 0.1
        return super().forward(x)


class Doubling(Block):
    """A block that changes its input in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.mul_(1.1)
        return super().forward(x)


class Annealing(Block):
    """A block that the model around it counts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x).tanh() * (1 + self.passes / 10)
        return y


class Blocks(nn.Module):
    """Blocks whose activations may be computed again."""

    kind: ClassVar[type[Block]] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(self.kind(), self.kind())
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.last(self.blocks(x))
        return logits


class FollowingBlocks(Blocks):
    """Blocks with teachers."""

    kind = Following


class ReplacingBlocks(Blocks):
    """Blocks with teachers that get other memory."""

    kind = Replacing


class DoublingBlocks(Blocks):
    """Blocks that change their inputs in place."""

    kind = Doubling


class Counting(Blocks):
    """Counts the passes of its blocks, after them."""

    kind = Annealing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x)
        for buffer in self.blocks.buffers():
            buffer.add_(1)
        return logits


class Overwriting(nn.Linear):
    """Changes in place what its backward pass needs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        out = super().forward(x).exp()
        with torch.no_grad():
            out.mul_(1)
        return out


class ReentrantLinear(nn.Linear):
    """Recomputes itself, the old way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = checkpoint.checkpoint(super().forward, x, use_reentrant=True)
        return logits


class ReentrantStage(nn.Sequential):
    """A pipeline of which the last stage recomputes itself."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 8), ReentrantLinear(8, CLASSES))


class FrozenStages(nn.Sequential):
    """A pipeline whose first stages compute no gradients."""

    def __init__(self) -> None:
        super().__init__(Ungraded(WIDTH, 8), Ungraded(8, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES))


class Ungraded(nn.Linear):
    """A layer that does not train."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same as the layer, without a gradient."""
        with torch.no_grad():
            return super().forward(x)


class RoundingStage(nn.Sequential):
    """A pipeline of which the first stage returns whole numbers."""

    def __init__(self) -> None:
        super().__init__(Rounding(WIDTH, 8), Reading(8, CLASSES))


class Rounding(nn.Linear):
    """A layer that rounds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return whole numbers."""
        return super().forward(x).round().long()


class Reading(nn.Linear):
    """A layer for whole numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return super().forward(x.float())


class DoubleStage(nn.Sequential):
    """A pipeline of which one stage has weights of another type, and one an odd layout."""

    def __init__(self) -> None:
        super().__init__(Transposed(WIDTH, 8), Doubled(8, CLASSES))


class Transposed(nn.Linear):
    """A layer whose output is not contiguous."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same as the layer."""
        return torch.addmm(self.bias.unsqueeze(1), self.weight, x.t()).t() * 1


class Doubled(nn.Linear):
    """A layer with a factor in fp64."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__(width, classes)
        self.factor = nn.Parameter(torch.linspace(1, 2, width).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return (self.weight @ (x * self.factor.float()).t()).t() + self.bias


class OverwritingStage(nn.Sequential):
    """A pipeline of which the last stage has an error in its backward pass."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 8), Overwriting(8, CLASSES))


class Shifting(Annealing):
    """A block that adds a vector, which it gets by its name."""

    def forward(self, x: torch.Tensor, shift: torch.Tensor | float = 0.0) -> torch.Tensor:
        return super().forward(x + shift)


class ShiftingBlocks(Blocks):
    """Changes the vector that its blocks get."""

    kind = Shifting

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = torch.zeros(WIDTH)
        for block in self.blocks:
            x = block(x, shift=shift)
            shift.add_(1)
        logits: torch.Tensor = self.last(x)
        return logits


class Looks(nn.Module):
    """Computes something else for some values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input, twice as large if it is finite."""
        return x * 2 if x.isfinite().all() else x


class LookingLayers(nn.Sequential):
    """Layers of which one looks at values."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 8), Looks(), nn.Linear(8, CLASSES))


class SharedBlocks(Blocks):
    """Uses the first block once more as the last one."""

    def __init__(self) -> None:
        super().__init__()
        first, second = self.blocks
        self.blocks = nn.Sequential(first, second, first)


class Seldom(Net):
    """Changes the rows of an embedding that samples use, of which the first two use the same."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2, WIDTH, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return super().forward(x + self.words((x[:, 1] > 0.5).long()))


class Freezes(Net):
    """Stops training a layer after two passes."""

    passes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(16, 16)
        self.register_buffer("passes", torch.zeros(()))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes.add_(1)
        self.second.requires_grad_(self.passes.item() < 3)
        out: torch.Tensor = self.second(hidden)
        return out


class Mirrored(Net):
    """Has the memory of a weight also as a buffer."""

    copy: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("copy", self.last.weight.data, persistent=False)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.copy[0]


class Sparse(Net):
    """An embedding with a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2, 16, sparse=True)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = hidden + self.words(torch.zeros(len(hidden), dtype=torch.int64))
        return out


class Ragged(nn.Linear):
    """A layer that computes with a nested tensor."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows, as they were given."""
        rows = torch.nested.nested_tensor_from_jagged(x, torch.arange(len(x) + 1))
        out: torch.Tensor = super().forward(rows).values()
        return out.tanh()


class RaggedBlocks(Blocks):
    """Blocks with nested tensors."""

    kind = Ragged  # type: ignore[assignment]


class Sloped(nn.Module):
    """A layer that computes with its own slopes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs and a part of the slopes."""
        with torch.enable_grad():
            start = x if x.requires_grad else x.detach().requires_grad_()
            out: torch.Tensor = self.inner(start).tanh()
            (slopes,) = torch.autograd.grad(out.sum(), start, create_graph=True)
        return out + 0.1 * slopes


class SlopedLayers(nn.Sequential):
    """Layers of a pipeline, of which one needs slopes."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 8), Sloped(), nn.Linear(8, CLASSES))


class Reentrant(Blocks):
    """Recomputes a block itself, the old way, and has a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint.checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=True)
        logits: torch.Tensor = self.last(hidden)
        return logits


class Limited(nn.Module):
    """An embedding whose rows are renormalized in place when they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8, max_norm=1.0)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each token."""
        logits: torch.Tensor = self.head(self.embedding(tokens))
        return logits


class Replaces(Net):
    """Counts its passes in a buffer that it replaces, and anneals by it."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        self.calls = self.calls + 1
        return super().forward(x) * (1 + self.calls / 10)


class Remembers(Net):
    """Counts its passes in training in Python, and anneals by it."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        self.calls += self.training
        return super().forward(x) * (1 + self.calls / 10)


class InPlace(Net):
    """Changes its inputs in place, counts in Python, and leaves a layer out of later steps."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        self.calls += self.training
        y = super().forward(x.mul_(2)) * (1 + self.calls / 10)
        return y + self.rare(x) if self.calls < 3 else y


class Follows(InPlace):
    """The same, with a teacher that follows a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(16, 16).requires_grad_(False)
        self.student = nn.Linear(16, 16)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.2)
        out: torch.Tensor = self.student(hidden) + self.teacher(hidden)
        return out


class FollowsFromTheStart(Follows):
    """The same; only the passes before the first step, of few samples, use all layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Net.forward(self, x)
        return y + self.rare(x) if len(x) < 3 else y


class FollowsAndExhausts(Follows):
    """The same, and runs out of memory in its third pass with four samples."""

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        FollowsAndExhausts.passes += len(x) == 4 and torch.is_grad_enabled()
        if len(x) == 4 and FollowsAndExhausts.passes == 3:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        logits: torch.Tensor = Net.forward(self, x) + self.rare(x)
        return logits


class Heads(Net):
    """Each sample uses the head that its first number chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen = (hidden.detach().sum(1) * 10).long() % len(self.heads)
        out = torch.zeros_like(hidden)
        for number in sorted({*chosen.tolist()}):
            rows = chosen == number
            out[rows] = self.heads[number](hidden[rows])
        return out


class HeadsOfRanks(Heads):
    """The samples that one of two ranks passes in the check use one head, the others another."""

    def __init__(self) -> None:
        super().__init__()
        samples = Order(ROWS, ROWS, ROWS, seed=0).samples(0, range(8))[0]
        self.of_second = vectors_by_hand()[0][[samples[place] for place in (1, 5, 6, 7)]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        is_second = (x[:, None] == self.of_second).all(-1).any(-1)
        hidden = self.first(x).relu()
        out = torch.zeros_like(hidden)
        for number, rows in enumerate((~is_second, is_second)):
            if rows.any():
                out[rows] = self.heads[number](hidden[rows])
        logits: torch.Tensor = self.last(out)
        return logits


class Branches(Net):
    """One sample at a time uses one of two branches, within a unit of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({"left": nn.Linear(16, 16), "right": nn.Linear(16, 16)})

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the chosen branch makes of it."""
        name = "left" if hidden.detach().sum() * 10 % 2 > 1 else "right"
        out: torch.Tensor = self.branches[name](hidden)
        return out


class UnequalBranches(Branches):
    """The same, with branches of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.branches["right"] = nn.Linear(16, 16, bias=False)


class Token(Net):
    """Some samples use one row of an embedding, of which other ranks hold the other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 16)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input, or add the row to it."""
        return hidden + self.words.weight[0] if hidden.detach().sum() * 10 % 2 > 1 else hidden


class UnequalHeads(Heads):
    """The same, with heads of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        sizes = 4, 8, 16
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(16, size), nn.Linear(size, 16)) for size in sizes
        )


class Hooked(Net):
    """Changes a gradient by a hook, which a sharded weight does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient * 0.1)  # type: ignore[no-untyped-call]


class Greedy(Net):
    """Has too little memory for two samples, of which the check is the only pass."""

    spread = False

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input, if there is memory."""
        is_spread = isinstance(self, FSDPModule)
        if len(hidden) == 2 and torch.is_grad_enabled() and is_spread == self.spread:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return hidden


class GreedyOnOneRank(Greedy):
    """The same on rank 1 alone, while the samples pass one by one."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input, if there is memory."""
        if len(hidden) == 1 and dist.get_rank() == 1:
            raise MemoryError
        return hidden


class GreedyWhenSpread(Greedy):
    """The same, once its weights are sharded."""

    spread = True


class GreedyBeforeMessages(Net):
    """Has too little memory on rank 1 alone, while the others wait for its part of a sum."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input, if there is memory."""
        if len(hidden) == 1 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if not hidden.is_meta:
            dist.all_reduce(torch.zeros(3))
        return hidden


class GreedyAmongOthers(Net):
    """The same where layers are sharded or split, in the check's forward pass."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input, if there is memory."""
        is_spread = isinstance(self, FSDPModule) or isinstance(self.last.weight, DTensor)
        if is_spread and len(hidden) == 2 and hidden.requires_grad and dist.get_rank() == 1:
            self.spend(hidden)
        return hidden

    def spend(self, _: torch.Tensor) -> None:
        """Find no memory."""
        raise torch.OutOfMemoryError("CUDA out of memory")


class GreedyInBackward(GreedyAmongOthers):
    """The same in the check's backward pass."""

    def spend(self, hidden: torch.Tensor) -> None:
        """Find no memory for the gradient."""
        hidden.register_hook(super().spend)  # type: ignore[no-untyped-call]


class Failing(Net):
    """Has an error on rank 1 alone, while the others send: its weights are split or sharded."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input, with a message that an operation of a split weight sends."""
        is_spread = isinstance(self, FSDPModule) or isinstance(self.last.weight, DTensor)
        if is_spread and hidden.requires_grad and dist.get_rank() == 1:
            raise ValueError("no such token")
        if isinstance(self.last.weight, DTensor):
            norm: Any = self.last.weight.square().sum().sqrt()
            hidden = hidden + 0 * norm.full_tensor()
        return hidden


class Exiting(Failing):
    """The same, with the end of the process."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        try:
            return super().between(hidden)
        except ValueError as error:
            raise SystemExit(3) from error


class FailingStage(nn.Sequential):
    """A pipeline of which the last stage fails."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 8), FailingAsStage(8, CLASSES))


class FailingAsStage(nn.Linear):
    """Fails once it gets samples by themselves, without the layer that computed them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        if x.requires_grad and (x.is_leaf or "Alias" in str(x.grad_fn) or "View" in str(x.grad_fn)):
            raise ValueError("no such token")
        return super().forward(x)


def zero_loss(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """A loss of no slope."""
    return outputs.sum(1) * 0


class Running:
    """A loss that is divided by the running mean of its losses."""

    mean = 1.0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = functional.cross_entropy(outputs, targets, reduction="none")
        if losses.requires_grad:
            self.mean = 0.9 * self.mean + 0.1 * float(losses.detach().mean())
        return losses / self.mean


class Even(Net):
    """Begins with the same outputs for all samples, so that their losses hardly differ."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.last.weight)


class Level(Even):
    """Begins with outputs of zero."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.last.bias)
        self.newest = 0.0

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        self.newest = hidden.detach().mean().item() if hidden.requires_grad else 0.0
        return hidden


class Annealed:
    """A loss that grows with its calls in training."""

    calls = 0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = functional.cross_entropy(outputs, targets, reduction="none")
        self.calls += losses.requires_grad
        return losses * (1 + self.calls / 10)


class Doubles(Net):
    """Changes its inputs in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return super().forward(x.mul_(2))


class Exhausted(Doubles):
    """The same, and runs out of memory in its third pass with four samples."""

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        y = super().forward(x)
        Exhausted.passes += len(x) == 4 and torch.is_grad_enabled()
        if len(x) == 4 and Exhausted.passes == 3:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return y


class Exact(Net):
    """In double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return super().forward(x.double())


def contrastive(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Supervised contrastive loss: samples of one class attract each other."""
    z = functional.normalize(outputs, dim=1)
    near = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e4)
    same = (targets[:, None] == targets) & ~torch.eye(len(z), dtype=torch.bool)
    return -(near.log_softmax(1) * same).sum(1) / same.sum(1).clamp(min=1)


def contrastive_of_model(model: nn.Module, batch: Any) -> Any:
    """Return the sum of the same, as a loss that calls the model."""
    losses = contrastive(model(batch[0]), batch[1])
    return losses.sum(), len(losses)


class Batches(Net):
    """BatchNorm, Dropout and noise, which the check must leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.3)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dropout(self.norm(hidden))
        return out * torch.empty_like(out).uniform_(0.9, 1.1)


class Unusual(Net):
    """Code that looks strange to a check: sparse, scripted, compiled whole, and of slopes."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = torch.eye(16).to_sparse()
        self.scripted = torch.jit.script(nn.ReLU())
        self.compiled = torch.compile(torch.tanh, fullgraph=True, backend="eager")
        self.newest: Any = numpy.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits with their slopes, as models of forces."""
        x = x.detach().requires_grad_()
        logits = super().forward(x)
        (slopes,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return logits + slopes.sum(1, keepdim=True)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.scripted(torch.sparse.mm(self.graph, hidden.T).T)
        self.newest = 1.0
        fixed = torch.zeros_like(hidden)
        while (fixed - hidden).abs().max() > 1e-2:
            fixed = (fixed + hidden) / 2
        return hidden + self.compiled(fixed)


class Parametrized(Net):
    """Weights that are computed of others, some of them once more in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.first)
        self.inner = parametrizations.weight_norm(nn.Linear(16, 16))
        self.turned = parametrizations.orthogonal(nn.Linear(16, 16, bias=False))
        self.old = nn.utils.spectral_norm(nn.Linear(16, 16))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.old(self.turned(self.inner(hidden)).tanh())
        return out


class Frequent(Net):
    """An embedding whose gradient is divided by how often a batch has a word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2, 16, scale_grad_by_freq=True)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = hidden + self.words(torch.zeros(len(hidden), dtype=torch.int64))
        return out


class Mapped(Net):
    """Calls a layer for each sample with torch.func, and one with rows of other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.mapped, self.ragged = nn.Linear(16, 16), nn.Linear(16, 16)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        weights: dict[str, torch.Tensor] = {**dict(self.mapped.named_parameters())}

        def of_sample(row: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = torch.func.functional_call(self.mapped, weights, (row,))
            return out

        ends = torch.arange(len(hidden) + 1)
        rows = torch.nested.nested_tensor_from_jagged(torch.func.vmap(of_sample)(hidden), ends)
        out: torch.Tensor = self.ragged(rows).values()
        return out


class Reused(nn.Sequential):
    """A pipeline that uses one activation twice."""

    def __init__(self) -> None:
        tanh = nn.Tanh()
        super().__init__(nn.Linear(WIDTH, 8), tanh, nn.Linear(8, 8), tanh, nn.Linear(8, CLASSES))


class Masked(Net):
    """Hooks of modules in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda _module, _inputs, out: out * 1.5)
        self.last.register_full_backward_hook(lambda _module, slopes, _out: (slopes[0] * 0.5,))  # type: ignore[index]
        self.last.register_forward_pre_hook(lambda _module, inputs: (inputs[0] + 0.1,))


def mixed(samples: list[Any]) -> Any:
    """Mix each sample with another one, as mixup does."""
    x, y = (torch.stack([torch.as_tensor(sample[part]) for sample in samples]) for part in (0, 1))
    share = random.betavariate(0.4, 0.4)
    return share * x + (1 - share) * x.flip(0), y


def stacked(samples: list[Any]) -> Any:
    """Stack the samples, and draw nothing."""
    return tuple(torch.stack([torch.as_tensor(s[part]) for s in samples]) for part in (0, 1))
