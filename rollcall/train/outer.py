"""Replicas that train alone and meet seldom: local SGD and DiLoCo.

Between two meetings, a replica takes steps on its own share of every batch. Local SGD
(https://arxiv.org/abs/1805.09767) then continues with the mean of the weights. DiLoCo
(https://arxiv.org/abs/2311.08105) takes the distance from the weights of the last meeting to the
mean for a gradient, and lets an outer SGD with Nesterov momentum apply it. Streaming DiLoCo
(https://arxiv.org/abs/2501.18512) exchanges one fragment of the weights at a time, while the next
steps are computed.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from rollcall.config.schema import Parallel
from rollcall.train.checkpoint.engine import OUTER, REPLICAS
from rollcall.train.numerics.ema import drop_gathered
from rollcall.train.parallel.part import flatten, unflatten
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.activity import doing
from rollcall.train.ranks.clock import COMMUNICATION, OTHER, clock
from rollcall.train.ranks.device import buckets, local_of
from rollcall.train.torch_private import copy_all

BUCKET = 2**26
"""Bytes of weights that are averaged at once, which bounds the memory for messages."""
BLOCK = 128
"""Numbers that share a scale in 4 bits."""
MOMENTUM, DUE = f"{OUTER}-momentum", f"{OUTER}-due"
KEPT = 0.5
"""Share of its own weights that a replica keeps if it took steps since they were sent."""
PARTS = ("model", "optim")
"""The parts of a state that differ between replicas in the middle of a round."""


class Outer:
    """The outer optimizer, on every rank; all ranks make each call together."""

    def __init__(self, strategy: Strategy, options: Parallel, device: torch.device) -> None:
        """Begin a round with the current weights, which are the same on all replicas."""
        assert strategy.replicas_apart is not None
        self._model, self._options, self._device = strategy.model, options, device
        # A group for itself, because every step sums numbers over the other one.
        replicas = dist.get_process_group_ranks(strategy.replicas_apart.get_group())
        self._group: Any = dist.new_group(replicas, use_local_synchronization=True)
        self._name = f"{REPLICAS}{strategy.apart}"
        self._number = str(strategy.replicas_apart.get_local_rank())
        is_mean = options.sync == "local-sgd"
        self._lr = 1.0 if is_mean else options.outer_lr
        self._decay = 0.0 if is_mean else options.outer_momentum
        drop_gathered(self._model)
        # The weights of the last meeting, and the momentum, by the names of the weights.
        named = self._model.named_parameters()
        self._anchor = {name: w.detach().clone() for name, w in named if w.requires_grad}
        zeros = {} if is_mean else self._anchor
        self._momentum = {name: torch.zeros_like(tensor) for name, tensor in zeros.items()}
        self._buckets = [*_buckets_of_fragments([*self._weights()], options)]
        # The mean changes that are on their way: the step that needs them, and their weights.
        self._messages: list[tuple[int, list[str], Callable[[], list[torch.Tensor]]]] = []
        self._due = dict.fromkeys(self._anchor, 0)  # the step that takes a new anchor in, or 0
        self._met = 0  # the last step of which this is done

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self._model.named_parameters():
            if name in self._anchor:  # also if it was frozen since
                yield name, weight

    @doing("meeting the other replicas")
    @torch.no_grad()
    def meet(self, step: int) -> bool:
        """Exchange what is due after this step; return whether that ended a round."""
        every, overlap = self._options.sync_every, self._options.sync_overlap

        def is_turn(turn: int) -> bool:  # also after a step that was left out
            return (step - turn) // every > (self._met - turn) // every

        starting = [names for turn, names in self._buckets if is_turn(turn)]
        has_ended = is_turn(0)
        if starting or any(0 < due <= step for due in self._due.values()):
            clock.enter(COMMUNICATION)
            drop_gathered(self._model)  # so that the parameters are shards
            self._take_in(step, KEPT)
            for names in starting:
                self._send(names, step + overlap)
                if not overlap:
                    self._take_in(step, 0.0)
            clock.enter(OTHER)
        self._met = step
        return has_ended

    def _send(self, names: list[str], due: int) -> None:
        weights = dict(self._weights())
        anchors = [_numbers(self._anchor[name]) for name in names]
        changes = map(torch.sub, anchors, (_numbers(weights[name]) for name in names))
        mean = self._means(changes, anchors, self._options.sync_compression)
        self._messages.append((due, names, mean))
        self._due |= dict.fromkeys(names, due)

    def _receive(self, step: float = math.inf) -> None:
        """Let the outer optimizer apply the mean changes that a step needs to the anchors."""
        while self._messages and self._messages[0][0] <= step:
            _, names, mean = self._messages.pop(0)
            for name, gradient in zip(names, mean(), strict=True):
                if self._momentum:
                    momentum = _numbers(self._momentum[name])
                    momentum.mul_(self._decay).add_(gradient)
                    gradient.add_(momentum, alpha=self._decay)
                _numbers(self._anchor[name]).sub_(gradient, alpha=self._lr)

    def _take_in(self, step: int, kept: float) -> None:
        """Let weights that are due continue from their anchors, and keep a share of their own."""
        self._receive(step)
        for name, weight in self._weights():
            if 0 < self._due[name] <= step:
                _numbers(weight).lerp_(_numbers(self._anchor[name]), 1 - kept)
                self._due[name] = 0

    @torch.no_grad()
    def average(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace real and complex tensors by the means over the replicas, in place."""
        reals = (x for x in map(_numbers, tensors) if x.is_floating_point())
        for some in buckets(enumerate(reals), BUCKET):
            local = [*some.values()]
            copy_all(local, self._means(local, local)())

    def _means(
        self, tensors: Iterable[torch.Tensor], like: list[torch.Tensor], how: str = "none"
    ) -> Callable[[], list[torch.Tensor]]:
        """Send tensors; return a function that waits for their means and returns them."""
        vectors = flatten(tensors)
        # Shards may lie in the host's memory.
        means = [_mean(vector.to(self._device), self._group, how) for vector in vectors]

        def received() -> list[torch.Tensor]:
            arrived = [mean().to(x) for mean, x in zip(means, vectors, strict=True)]
            return [*unflatten(arrived, like)]

        return received

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the mean of the replicas' weights within this context."""
        drop_gathered(self._model)
        weights = [local_of(weight.detach()) for _, weight in self._weights()]
        before = [weight.clone() for weight in weights]
        self.average(weights)
        try:
            yield
        finally:
            drop_gathered(self._model)
            copy_all(weights, before)

    def spread(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with the means, this replica's own and the outer state."""
        replica, means = {}, {}
        trained = {id(weight) for _, weight in self._weights()}
        named = self._model.named_parameters(remove_duplicate=False)
        alike = {n for n, w in named if id(w) not in trained and not w.requires_grad}
        for part in PARTS:
            named = ((n, tensor) for n, tensor in state[part].items() if n not in alike)
            tensors = {n: tensor for n, tensor in named if isinstance(tensor, torch.Tensor)}
            copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            self.average(copies.values())
            replica[part], means[part] = tensors, {**state[part], **copies}
        self._receive()
        # Nothing reads `met`, but older checkpoints hold it.
        outer: dict[str, Any] = {OUTER: {"anchor": self._anchor, "met": self._met}}
        outer |= {MOMENTUM: self._momentum} if self._momentum else {}
        outer[DUE] = {name: torch.tensor(step) for name, step in self._due.items()}
        return {**state, **means, **outer, self._name: {self._number: replica}}

    def of_replica(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a filled state with what this replica had, or the means if they were others."""
        replica = state.get(self._name, {}).get(self._number, {})
        return {**state, **{part: {**state[part], **replica.get(part, {})} for part in PARTS}}

    @torch.no_grad()
    def restore(self, state: dict[str, Any], step: int) -> None:
        """Continue the round of a filled state; begin one if the run has had none before."""
        self._met = step
        due = state.get(DUE, {})
        self._due = {name: int(due.get(name, 0)) for name in self._due}
        for name, weight in () if OUTER in state else self._weights():
            local_of(self._anchor[name]).copy_(local_of(weight))
        for momentum in () if MOMENTUM in state else self._momentum.values():
            local_of(momentum).zero_()


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, of complex numbers a view as real ones."""
    local = local_of(tensor)
    return torch.view_as_real(local) if local.is_complex() else local


def _buckets_of_fragments(
    weights: Sequence[tuple[str, torch.Tensor]], options: Parallel
) -> Iterator[tuple[int, list[str]]]:
    """Yield the names of each bucket, with the steps into a round after which it is sent."""
    number, every = options.sync_fragments, options.sync_every
    total, before = sum(weight.numel() for _, weight in weights), 0
    fragments: list[list[tuple[str, torch.Tensor]]] = [[] for _ in range(number)]
    for name, weight in weights:
        fragments[min(before * number // max(total, 1), number - 1)].append((name, weight))
        before += weight.numel()
    for index, fragment in enumerate(fragments, 1):
        for bucket in buckets(fragment, BUCKET):
            yield index * every // number % every, [*bucket]


def _mean(vector: torch.Tensor, group: dist.ProcessGroup, how: str) -> Callable[[], torch.Tensor]:
    """Send a vector; return a function that waits for its mean, the same on all ranks."""
    ranks = dist.get_world_size(group)
    if how == "int4":
        message = pack(vector)
        messages = [torch.empty_like(message) for _ in range(ranks)]
        gathering = dist.all_gather(messages, message, group=group, async_op=True)

        def unpacked() -> torch.Tensor:
            gathering.wait()
            return torch.stack([unpack(other, len(vector)) for other in messages]).mean(0)

        return unpacked
    sent = vector.bfloat16() if how == "bf16" else vector
    reduction = dist.all_reduce(sent, group=group, async_op=True)

    def reduced() -> torch.Tensor:
        reduction.wait()
        return sent.to(vector) / ranks

    return reduced


def pack(vector: torch.Tensor) -> torch.Tensor:
    """Return a vector as bytes: its numbers in 4 bits, then the scale of each BLOCK in fp32."""
    padded = torch.nn.functional.pad(vector.float(), (0, -len(vector) % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(1, keepdim=True) / 7
    codes = (padded / scales.clamp(min=torch.finfo(torch.float32).tiny)).round() + 8
    high, low = codes.to(torch.uint8).view(-1, 2).unbind(1)
    return torch.cat([high * 16 + low, scales.view(-1).view(torch.uint8)])


def unpack(message: torch.Tensor, length: int) -> torch.Tensor:
    """Return the `length` numbers that `pack` made a message of, in fp32."""
    blocks = -(-length // BLOCK)
    codes, scales = message.tensor_split([blocks * BLOCK // 2])
    numbers = torch.stack([codes // 16, codes % 16], 1).float().view(blocks, BLOCK) - 8
    # A copy, because the bytes of fp32 numbers must be aligned.
    return (numbers * scales.clone().view(torch.float32).view(-1, 1)).view(-1)[:length]
