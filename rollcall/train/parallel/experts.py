"""Mixtures of experts, and experts spread over ranks.

Each token passes through a few of many perceptrons (Shazeer et al., 2017,
https://arxiv.org/abs/1701.06538); none is dropped, unless experts have a capacity. Biases of the
router balance their loads. They move after each step, as in DeepSeek-V3,
https://arxiv.org/abs/2412.19437; losses may help. With a mesh dimension `expert`, each of its ranks
holds some of the experts of each layer, and tokens travel to them and back by two all-to-alls
(GShard, https://arxiv.org/abs/2006.16668).
"""

import fnmatch
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

from rollcall.config.schema import ConfigError
from rollcall.messages.text import listed
from rollcall.train.data.source import Batch
from rollcall.train.parallel.part import Part, nearest_multiples
from rollcall.train.ranks.device import local_of
from rollcall.train.ranks.measures import measure
from rollcall.train.torch_private import all_to_all

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
UNIT = 2**-20
"""Nats in which entropies are added up: sums of integers do not depend on their order."""
DEAD = 100
"""Steps after which an expert that no token has chosen is named."""


class Experts(nn.Module):
    """Perceptrons of which each token passes the `top_k` with the highest scores; their router."""

    bias: torch.Tensor

    def __init__(
        self,
        width: int,
        hidden: int,
        number: int,
        top_k: int = 2,
        *,
        shared: int = 0,
        gated: bool = False,
        scores: str = "softmax",
        balance_rate: float = 1e-3,
        balance_loss: float = 0.0,
        z_loss: float = 0.0,
        capacity_factor: float = 0.0,
        routed_scale: float = 1.0,
    ) -> None:
        """Create the layer.

        Both losses are means over sequences of x (sequences, …, width), so a result does not depend
        on how a batch is cut. They change gradients, not the output; padding has none.

        Args:
            width: numbers of a token, before and after the layer.
            hidden: units of an expert.
            number: experts.
            top_k: experts that a token passes.
            shared: experts that every token passes beside them.
            gated: SiLU with a gate, https://arxiv.org/abs/2002.05202, instead of GELU.
            scores: softmax or sigmoid of the router's outputs.
            balance_rate: how far the biases move in a step; 0 does not balance.
            balance_loss: weight of the loss of uneven loads within a sequence (DeepSeek-V3, 2.1.2).
            z_loss: weight of the loss of large outputs of the router (ST-MoE,
                https://arxiv.org/abs/2202.08906, 2.2).
            capacity_factor: in training, how many tokens of a sequence an expert takes, times the
                mean (Switch Transformer, https://arxiv.org/abs/2101.03961, 2.2); 0 for all. The
                later ones do not pass it, so no token depends on one after it.
            routed_scale: factor of what the chosen experts add (DeepSeek-V3's code has 2.5).

        Raises:
            ValueError: `top_k` or `scores` is not possible.
        """
        super().__init__()
        if not 1 <= top_k <= number:
            raise ValueError(f"top_k={top_k}: expected 1 to {number}, the number of experts")
        if scores not in ("softmax", "sigmoid"):
            raise ValueError(f"scores={scores}: expected softmax or sigmoid")
        self.number, self.top_k, self.scores = number, top_k, scores
        self.balance_rate, self.balance_loss, self.z_loss = balance_rate, balance_loss, z_loss
        self.capacity_factor, self.routed_scale = capacity_factor, routed_scale
        # The factor of a sample's loss in the gradient; None for the mean over the samples of x.
        self.scale: Callable[[], float | torch.Tensor] | None = None
        self.router = nn.Linear(width, number, bias=False)
        self.perceptrons = Perceptrons(width, hidden, number, gated)
        self.shared = Perceptrons(width, shared * hidden, 1, gated) if shared else None
        self.register_buffer("bias", torch.zeros(number))
        self._group: dist.ProcessGroup | None = None  # ranks that hold the other experts
        # Totals of the newest passes: an own training loop may never take them.
        self._totals: deque[torch.Tensor] = deque(maxlen=1024)

    def spread(self, group: dist.ProcessGroup) -> None:
        """Send each token to the ranks of its experts, which `Shard(0)` has divided."""
        self._group = group

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # shapes depend on the router
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (…, width) to the same shape."""
        tokens = x.flatten(0, -2)
        with torch.autocast(_device(x), enabled=False):  # rounding would change the choice
            logits = functional.linear(tokens.float(), self.router.weight.float())
        scores = logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()
        chosen = (scores.detach() + self.bias).topk(self.top_k, -1).indices
        weights = scores.gather(-1, chosen)
        if self.top_k > 1:  # the weight of one expert must follow its score, or nothing trains it
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * self.routed_scale
        drops = self.training and self.capacity_factor > 0 and not x.is_meta
        taken = self._within_capacity(chosen.view(len(x), -1)).view_as(chosen) if drops else chosen
        y = _mixed(tokens, taken, weights, self.number, self._group, self.perceptrons, drops)
        if self.shared:
            y = y + self.shared(tokens, chosen.new_full((1,), len(tokens)))
        y = y.view_as(x)
        if self.training and y.requires_grad and self.router.weight.requires_grad:
            if self.balance_loss or self.z_loss:
                y = _Penalized.apply(y, self._penalties(len(x), logits, scores, chosen), self.scale)
            y.register_hook(partial(self._note, chosen, taken, scores.detach()))  # type: ignore[no-untyped-call]
        return y

    def _within_capacity(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return the experts of sequences (rows, n); `number` replaces full ones."""
        order = chosen.argsort(dim=1, stable=True)
        experts = chosen.gather(1, order)
        numbers = torch.arange(self.number, device=chosen.device).repeat(len(chosen), 1)
        begins = torch.searchsorted(experts, numbers).gather(1, experts)
        queue = torch.arange(chosen.shape[1], device=chosen.device) - begins
        most = math.ceil(self.capacity_factor * chosen.shape[1] / self.number)
        experts = experts.where(queue < most, self.number)
        return torch.empty_like(chosen).scatter_(1, order, experts)

    def _penalties(
        self, rows: int, logits: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        chosen = chosen.view(rows, -1)
        loads = torch.zeros(rows, self.number, device=logits.device)
        loads.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=loads.dtype))
        shares = (scores / scores.sum(-1, keepdim=True)).view(rows, -1, self.number).mean(1)
        uneven = (loads * shares).sum(1) * self.number / chosen.shape[1]
        large = logits.logsumexp(-1).square().view(rows, -1).mean(1)
        return self.balance_loss * uneven + self.z_loss * large

    def _note(
        self,
        chosen: torch.Tensor,
        taken: torch.Tensor,
        scores: torch.Tensor,
        gradient: torch.Tensor,
    ) -> None:
        """Count tokens in the backward pass, where padding has no gradient and no repeat counts."""
        has_gradient = (gradient.flatten(0, -2) != 0).any(-1, keepdim=True)
        numbers = chosen.where(has_gradient, self.number)
        entropies = torch.special.entr(scores / scores.sum(-1, keepdim=True)).sum(-1, keepdim=True)
        entropies = (entropies / UNIT * self.top_k).long().where(has_gradient, 0)
        counts = _count(numbers.flatten(), self.number + 1)
        dropped = has_gradient & (taken == self.number)
        self._totals.append(torch.cat([counts[:-1], entropies.sum(0), dropped.sum()[None]]))

    def take_totals(self, passes: int = 0) -> torch.Tensor:
        """Return, and forget, totals of passes, 0 for all: tokens by expert, entropies, drops."""
        totals = [*self._totals][-passes:]
        self._totals.clear()
        return sum(totals, self.bias.new_zeros(self.number + 2, dtype=torch.int64))

    def take_counts(self) -> torch.Tensor:
        """Return, and forget, the tokens of each expert in all passes."""
        return self.take_totals()[:-2]

    def move_biases(self, counts: torch.Tensor) -> None:
        """Raise the bias of experts with fewer tokens than the mean, and lower the others'."""
        self.bias += self.balance_rate * (counts.double().mean() - counts).sign().to(self.bias)


def _mixed(
    tokens: torch.Tensor,
    taken: torch.Tensor,
    weights: torch.Tensor,
    number: int,
    group: dist.ProcessGroup | None,
    compute: Compute,
    drops: bool = False,
) -> torch.Tensor:
    """Return the weighted sum of the outputs of experts `taken` (tokens, k); `number` is none."""
    flat = taken.flatten()
    order, counts = flat.argsort(stable=True), _count(flat, number + 1)[:-1]
    passing = order[: int(counts.sum())] if drops else order  # waits for a GPU
    rows = tokens.repeat_interleave(taken.shape[1], 0).index_select(0, passing)
    outputs = _exchanged(rows, counts, group, compute)
    if drops:
        outputs = functional.pad(outputs, (0, 0, 0, len(order) - len(passing)))
    outputs = outputs.index_select(0, order.argsort()).view(*taken.shape, -1)
    return (outputs * weights.unsqueeze(-1)).sum(1).type_as(tokens)


def _exchanged(
    rows: torch.Tensor, counts: torch.Tensor, group: dist.ProcessGroup | None, compute: Compute
) -> torch.Tensor:
    """Pass rows, sorted by expert, through the experts wherever these are."""
    if group is None or rows.is_meta:
        return compute(rows, counts)
    ranks = dist.get_world_size(group)
    divided = counts.chunk(ranks)  # as DTensor divides; the last rank may have fewer
    held = [len(part) for part in divided]
    mine = held[dist.get_rank(group)]
    theirs = all_to_all(counts, [mine] * ranks, held, group).view(ranks, mine)
    sums = torch.stack([*(part.sum() for part in divided), *theirs.sum(1)])
    sent, received = sums.view(2, ranks).tolist()  # waits for a GPU
    rows = all_to_all(rows, received, sent, group)
    # They come sorted by rank, then by expert.
    numbers = torch.arange(theirs.shape[1], device=rows.device).repeat(ranks)
    numbers = numbers.repeat_interleave(theirs.flatten(), output_size=len(rows))
    order = numbers.argsort(stable=True)
    outputs = compute(rows.index_select(0, order), theirs.sum(0))
    return all_to_all(outputs.index_select(0, order.argsort()), sent, received, group)


class _Penalized(torch.autograd.Function):
    """Adds a loss of each sequence that has a gradient to the loss, wherever that is computed."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, penalties: torch.Tensor, scale: Any) -> torch.Tensor:
        ctx.scale, ctx.kind = scale, penalties.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        counts = (gradients[0] != 0).flatten(1).any(1).to(ctx.kind)
        return gradients[0], counts * (ctx.scale() if ctx.scale else 1 / len(counts)), None


class Perceptrons(nn.Module):
    """Perceptrons of two layers and no biases, as one tensor for each of the layers."""

    def __init__(self, width: int, hidden: int, number: int, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        units = hidden * (2 if gated else 1)
        self.up = nn.Parameter(torch.empty(number, width, units).uniform_(-1, 1) * width**-0.5)
        self.down = nn.Parameter(torch.empty(number, hidden, width).uniform_(-1, 1) * hidden**-0.5)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Map (rows, width) to the same shape; the first counts[0] rows are for the first one."""
        hidden = _products(rows, local_of(self.up), counts)
        if self.gated:
            gate, hidden = hidden.chunk(2, -1)
            hidden = functional.silu(gate) * hidden
        else:
            hidden = functional.gelu(hidden)
        return _products(hidden, local_of(self.down), counts)


def _products(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled(_device(rows)):
        kind = torch.get_autocast_dtype(_device(rows))
        rows, weights = rows.to(kind), weights.to(kind)
    is_aligned = all(size % 8 == 0 for size in weights.shape[1:])  # to 16 bytes
    if rows.is_cuda and rows.dtype == torch.bfloat16 and is_aligned:
        return functional.grouped_mm(rows, weights, offs=counts.cumsum(0).int())
    # The meta device only asks for shapes and costs.
    sizes = [len(rows)] + [0] * (len(weights) - 1) if rows.is_meta else counts.tolist()
    parts = torch.split(rows, sizes)
    return torch.cat([part @ weight for part, weight in zip(parts, weights.unbind(), strict=True)])


def _device(x: torch.Tensor) -> str:
    return "cpu" if x.is_meta else x.device.type


def _count(numbers: torch.Tensor, limit: int) -> torch.Tensor:
    """Return how often each number below the limit occurs, without waiting for a GPU."""
    counts = torch.zeros(limit, dtype=torch.int64, device=numbers.device)
    return counts.scatter_add_(0, numbers, torch.ones_like(numbers))


def stacks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose weights have an expert in each row, by the names of their layers.

    They are those of `Experts`, and those that the model names in `expert_plan`: patterns of names.
    Such a module maps (tokens, width), the numbers of the experts (tokens, k) and their weights
    (tokens, k) to (tokens, width).
    """
    named = dict(model.named_modules())
    stacks = {name: m.perceptrons for name, m in named.items() if isinstance(m, Experts)}
    patterns = getattr(model, "expert_plan", ())
    planned = {name for pattern in patterns for name in fnmatch.filter(named, pattern)}
    return stacks | {name: named[name] for name in named if name in planned - stacks.keys()}


class _Own:
    """The forward pass of a module of `expert_plan` of which this rank has some of the experts."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._module, self._group = module, group
        self._kind = type(module)  # FSDP makes another one of it

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # shapes depend on the router
    def __call__(
        self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        count = len(next(self._module.parameters()))
        return _mixed(tokens, chosen.long(), weights, count, self._group, self._compute)

    def _compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Let the module compute with the experts that are here."""
        if not len(rows):  # in the form of the other ranks, and the gradient still travels
            count = functional.one_hot(counts.new_zeros(()), len(counts))
            none = self._compute(rows.new_zeros(1, rows.shape[1]), count)[:0]
            return none + rows.type_as(none)
        held = {name: local_of(w) for name, w in self._module.named_parameters(recurse=False)}
        absent = dict.fromkeys(self._module._parameters.keys() - held)
        bare = object.__new__(self._kind)
        vars(bare).update(vars(self._module) | held, _parameters=absent)
        del vars(bare)["forward"]
        if hasattr(bare, "num_experts"):  # as modules of transformers have it
            vars(bare)["num_experts"] = len(counts)
        numbers = torch.arange(len(counts), device=rows.device)
        numbers = numbers.repeat_interleave(counts, output_size=len(rows)).unsqueeze(1)
        rows = rows.to(next(iter(held.values())).dtype)
        return bare.forward(rows, numbers, torch.ones_like(numbers, dtype=rows.dtype))  # type: ignore[no-any-return]


class Balance(Part):
    """Moves the biases of all layers of experts after each step, and measures their imbalance."""

    changes_passes = False
    finishes_alone = True

    def __init__(
        self,
        layers: Mapping[str, tuple[int, Experts | None]],
        copies: int,
        passes: Callable[[], int],
        scale: Callable[[], float | torch.Tensor],
        drops: bool,
        device: torch.device,
    ) -> None:
        """Balance these layers, by name: the number of experts, and the layer, if it is here.

        So many `copies` count the same tokens. `passes` returns how many of the newest counts are
        of the step, 0 for all; `scale` a sample's factor in the gradient. `drops`: with capacity.
        """
        self._layers, self._copies, self._passes = layers, copies, passes
        self._drops = drops
        self._names = [f"{name} {n}" for name, (size, _) in layers.items() for n in range(size)]
        # The steps in which no token has chosen an expert, and all steps.
        self._idle = torch.zeros(len(self._names), dtype=torch.int64, device=device)
        self._steps = 0
        for _, layer in layers.values():
            if layer:
                layer.scale = scale

    @torch.no_grad()
    def finish(self, model: nn.Module) -> None:  # noqa: ARG002
        """Add up the tokens of each expert over all ranks."""
        none = partial(torch.zeros, dtype=torch.int64, device=self._idle.device)
        passes = self._passes()
        layers = self._layers.values()
        held = [layer.take_totals(passes) if layer else none(size + 2) for size, layer in layers]
        totals = torch.cat(held)
        if dist.get_world_size() > 1:
            dist.all_reduce(totals)
        sums = torch.split(totals // self._copies, [size + 2 for size, _ in layers])
        parts = [total[:-2] for total in sums]
        loads, entropies = [], []
        for (name, (_, layer)), part, total in zip(self._layers.items(), parts, sums, strict=True):
            if layer:
                layer.move_biases(part)
            # A layer without gradients, before frozen weights alone, counts no tokens.
            loads.append(part.max() / part.double().mean().clamp(min=1e-9))
            entropies.append(total[-2] * UNIT / part.sum().clamp(min=1))
            measure(f"expert_imbalance/{name}", loads[-1])
            measure(f"router_entropy/{name}", entropies[-1])
            if self._drops:
                measure(f"dropped_tokens/{name}", total[-1] / part.sum().clamp(min=1))
        measure("expert_imbalance", torch.stack(loads).max())
        measure("router_entropy", torch.stack(entropies))
        if self._drops:
            choices = torch.cat(parts).sum().clamp(min=1)
            measure("dropped_tokens", torch.stack([total[-1] for total in sums]).sum() / choices)
        idle = torch.cat([(part == 0) & part.any() for part in parts])
        measure("idle_experts", idle.sum())
        self._idle = torch.where(idle, self._idle + 1, 0)
        self._steps += 1
        if self._steps % DEAD == 0:  # seldom, because it waits for a GPU
            dead = [self._names[n] for n in (self._idle >= DEAD).nonzero().flatten().tolist()]
            if dead and dist.get_rank() == 0:
                text = f"no token has chosen {listed(dead, 4)} in the last {DEAD} steps"
                remedy = "raise model.balance_rate, or choose fewer experts"
                print(f"rollcall: warning: {text}: {remedy}", file=sys.stderr, flush=True)


class Spread(Part):
    """The experts of each layer, divided over the ranks of one dimension."""

    suspicion = "a layer of experts that only some ranks call"

    def __init__(self, mesh: DeviceMesh, shards: int, name: str) -> None:
        """Divide over the mesh; `shards` ranks share each expert, for the model of this name."""
        self._mesh, self._shards, self._name = mesh, shards, name
        self._stacks: list[nn.Module] = []

    def check(self, model: nn.Module, _example: Batch) -> None:
        """Raise ConfigError if the model has no experts, or some ranks would have none."""
        stacks, degree = stacks_of(model), self._mesh.size()
        named = dict(model.named_modules())
        for pattern in getattr(model, "expert_plan", ()):
            if not fnmatch.filter(named, pattern):
                raise ConfigError(f"expert_plan has {pattern}, but the model has no such module")
        if not stacks:
            raise ConfigError(
                f"the mesh has expert={degree}, but model.name={self._name} has no experts: set "
                "model.experts for gpt, use rollcall.Experts in your model, name its experts in "
                "expert_plan, or remove expert"
            )
        for name, stack in stacks.items():
            shapes = {key: tuple(weight.shape) for key, weight in stack.named_parameters()}
            numbers = {shape[:1] for shape in shapes.values() if len(shape) > 1}
            if len(numbers) != 1 or any(len(s) < 2 or "." in key for key, s in shapes.items()):
                raise ConfigError(
                    f"expert_plan: expected all weights of {name} to be of itself, with an expert "
                    f"in each row of the first dimension; got {shapes or 'none'}"
                )
            [[number]] = numbers
            if wrong := [n for n, b in stack.named_buffers() if b.shape[:1] == (number,)]:
                raise ConfigError(f"expert_plan: {name}.{wrong[0]} is a buffer of all experts")
            if number <= (degree - 1) * (most := -(-number // degree)):
                raise ConfigError(
                    f"{name} has {number} experts, {most} for a rank, which leave none to the last "
                    f"rank of expert={degree}; choose {nearest_multiples(number, degree)} experts"
                )
            for weight in stack.parameters():
                if weight.shape[1] % self._shards:
                    raise ConfigError(
                        f"{name} has experts of {weight.shape[1]} units, which do not divide by "
                        f"the {self._shards} ranks that share an expert; choose "
                        f"{nearest_multiples(weight.shape[1], self._shards)}"
                    )

    def apply(self, model: nn.Module) -> None:
        """Keep this rank's experts."""
        group, stacks = self._mesh.get_group(), stacks_of(model)
        self._stacks = [*stacks.values()]
        for layer, stack in stacks.items():
            for name, weight in [*stack.named_parameters()]:
                part = distribute_tensor(weight, self._mesh, [Shard(0)], src_data_rank=None)
                setattr(stack, name, nn.Parameter(part, requires_grad=weight.requires_grad))
            owner = model.get_submodule(layer)
            if isinstance(owner, Experts):
                owner.spread(group)
            else:
                vars(stack)["forward"] = _Own(stack, group)

    def finish(self, model: nn.Module) -> None:  # noqa: ARG002
        """Divide the gradients, which are sums over the ranks of the dimension, as means are."""
        for stack in self._stacks:
            for weight in stack.parameters():
                if weight.grad is not None:
                    local_of(weight.grad).div_(self._mesh.size())
