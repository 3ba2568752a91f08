"""Everything that updates change: weights, buffers, optimizer, average, scale and spikes."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from rollcall.config import ConfigError
from rollcall.messages.text import listed
from rollcall.train import torch_private
from rollcall.train.checkpoint.contents import OBJECTS
from rollcall.train.checkpoint.read import put
from rollcall.train.checkpoint.write_plan import chunks
from rollcall.train.data.source import Batch
from rollcall.train.numerics import optim
from rollcall.train.numerics.ema import Ema, drop_gathered
from rollcall.train.numerics.hidden import Audit, Hidden
from rollcall.train.numerics.losses import Objective
from rollcall.train.outer import Outer
from rollcall.train.parallel.part import flatten, named_buffers, unflatten
from rollcall.train.parallel.shard import local_optimizer
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.device import local_of
from rollcall.train.ranks.run import Run
from rollcall.train.ranks.world import World
from rollcall.train.recovery.spikes import Spikes


class Buffers:
    """The buffers that a forward pass changes or replaces, such as BatchNorm's statistics."""

    def __init__(self, model: nn.Module) -> None:
        self._owners: list[tuple[dict[str, Any], str]] = [
            (torch_private.buffers_of(module), leaf)
            for _, module, leaf in named_buffers(model)
            if leaf not in torch_private.temporary_buffers(module)
        ]
        self._kept: list[torch.Tensor] = []  # the values of all, a vector of each type
        self._like: list[torch.Tensor] = []  # the buffers that had them

    def now(self) -> list[torch.Tensor]:
        """Return the buffers."""
        return [buffers[name] for buffers, name in self._owners]

    def keep(self) -> None:
        """Copy the buffers."""
        self._like = [*map(local_of, self.now())]
        self._kept = flatten(self._like)

    def restore(self, where: torch.Tensor) -> None:
        """Restore the copies if `where` is true, on the device."""
        pairs = zip(map(local_of, self.now()), unflatten(self._kept, self._like), strict=True)
        same = [(buffer, kept.to(buffer)) for buffer, kept in pairs if buffer.shape == kept.shape]
        now = [buffer for buffer, _ in same]
        vectors = zip(flatten(kept for _, kept in same), flatten(now), strict=True)
        chosen = [torch.where(where.to(kept.device), kept, new) for kept, new in vectors]
        if now:  # a few kernels for all, and not a few for each
            torch_private.copy_all(now, [*unflatten(chosen, now)])


class Written:
    """The inputs, attributes and weights that forward() writes to, which a repeated step needs."""

    def __init__(self, model: nn.Module, loss: object, known: Collection[str]) -> None:
        """Keep the weights whose names are `known`, and others that the first step writes to."""
        self._model, self._roots = model, {"model": model, "loss": loss}
        self._weights = {name: w for name, w in model.named_parameters() if name in known}
        self._is_first = True
        # What the newest steps began with: a step may be repeated after the next has been computed.
        self._kept: dict[int, tuple[Hidden, list[tuple[torch.Tensor, torch.Tensor]]]] = {}

    def keep(self, number: int, batch: Batch) -> Batch:
        """Copy all before a step, or restore it if the step is repeated; return its batch."""
        self.restore(number)
        self._kept = {known: kept for known, kept in self._kept.items() if known == number - 1}
        copies = [(weight, weight.detach().clone()) for weight in self._weights.values()]
        self._kept[number] = self._hidden, _ = Hidden(self._roots), copies
        self._batch = batch.map(torch.clone)
        self._before = [torch_private.version(weight) for weight in self._model.parameters()]
        return self._batch

    def are_any(self) -> bool:
        """Return False if the step has written to nothing, so that none has to be kept."""
        found = self.names() or any(map(torch_private.version, self._batch.tensors))
        self._is_first = False
        return bool(found)

    def names(self) -> list[str]:
        """Return the names of weights, buffers and attributes that the newest step has changed."""
        if self._is_first:
            # The first forward() may have made weights, which is refused after the step.
            pairs = zip(self._model.named_parameters(), self._before, strict=False)
            self._weights |= dict(n for n, old in pairs if torch_private.version(n[1]) != old)
        return [*self._weights, *self._hidden.changed()]

    @torch.no_grad()
    def restore(self, number: int) -> None:
        """Undo what this step and later ones have written to."""
        if number in self._kept:
            hidden, copies = self._kept[number]
            hidden.restore()
            for weight, copy in copies:
                weight.copy_(copy)


class TrainingState:
    """The state of the model and its optimizer that a checkpoint holds, on this rank."""

    def __init__(
        self, run: Run, strategy: Strategy, optimizer: torch.optim.Optimizer, objective: Objective
    ) -> None:
        self._config = config = run.config
        self.strategy, self.optimizer, self.objective = strategy, optimizer, objective
        self.local_optimizer = local_optimizer(optimizer)
        buffers = Buffers(strategy.trained)
        self.buffers = buffers if buffers.now() else None
        turns, decay = bool(objective.loss.turns), config.optim.ema
        self.ema = Ema(strategy.model, decay, turns) if decay else None
        is_apart, device = strategy.replicas_apart is not None, run.world.device
        self.outer = Outer(strategy, config.parallel, device) if is_apart else None
        factor = config.faults.spike_factor
        self.spikes = Spikes(factor, device) if factor else None
        self._weights = {*dict(strategy.trained.named_parameters())}
        self._run = run
        self._restored: dict[str, Any] = {}  # states of objects in the newest checkpoint
        self.objects: dict[str, Any] = {}  # of the user's, by the keys that name them
        self._stateful: dict[str, Stateful] = {}
        self.adopt({"train.loss": objective.loss.function})

    @property
    def lags(self) -> bool:
        """True if a part of it, the state of a callback, follows the steps late."""
        return any(name.startswith("train.callbacks") for name in self._stateful)

    def adopt(self, objects: Mapping[str, Any]) -> None:
        """Save and restore the state of the user's objects; ConfigError if it cannot be saved."""
        self.objects |= objects
        for name, value in objects.items():
            # The tensors of a loss are saved like the model's.
            if isinstance(value, Stateful) and value is not self.objective.loss.module:
                self._stateful[name] = value
                chunks({name: value.state_dict()})
                if name in self._restored:
                    value.load_state_dict(self._restored[name])

    def audit(self) -> Audit:
        """Return an audit of what training changes."""
        roots = {"model": self.strategy.model, "optim": self.local_optimizer, **self.objects}
        # The state of a module are its tensors; it may have further attributes.
        modules = {name for name, value in roots.items() if isinstance(value, nn.Module)}
        is_compared = self._run.world.world_size > 1 and self._config.parallel.check != "off"
        return Audit(roots, self._stateful.keys() - modules, is_compared)

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Give the model the weights to evaluate while the context is open."""
        self._share_buffers()
        self._average_ema()
        average = self.ema if self._config.optim.evaluate_ema else self.outer
        with average.in_place() if average else nullcontext():
            yield
        drop_gathered(self.strategy.model)  # which no backward pass has done

    def meet(self, step: int) -> None:
        """Let replicas that train alone meet, if that is due after this step."""
        if self.outer and self.outer.meet(step):
            self._share_buffers()

    def _share_buffers(self) -> None:
        if self.buffers:
            self.strategy.share(self.buffers.now())

    def _average_ema(self) -> None:
        # The mean of the replicas' averages is the average of their mean, whenever it is taken.
        if self.ema and self.outer:
            self.outer.average(self.ema.state().values())

    def read(self) -> dict[str, Any]:
        """Return all under global names, to save or to fill in place; all ranks call it."""
        self._share_buffers()  # so that all saved ones belong together
        return self.read_alone()

    def read_alone(self) -> dict[str, Any]:
        """Return the same without a collective, unless replicas train alone."""
        optim.complete_state(self.local_optimizer)
        self._average_ema()
        state = self.strategy.state(self.optimizer)
        state = self.outer.spread(state) if self.outer else state
        more = ("ema", self.ema), ("scaler", self.objective.scaler), ("spikes", self.spikes)
        state |= {name: part.state() for name, part in more if part}
        if not self._config.checkpoint.save_frozen:
            drop_frozen(self.strategy.model, state)
        if self._stateful:
            state[OBJECTS] = {name: value.state_dict() for name, value in self._stateful.items()}
        return state

    def load(self, state: dict[str, Any], step: int) -> None:
        """Load what `read` returned and a checkpoint of this step has filled."""
        state = self.outer.of_replica(state) if self.outer else state
        if not self._config.checkpoint.save_frozen:  # torch wants all weights
            whole = self.strategy.state(self.optimizer)
            state = {**state, "model": {**whole["model"], **state["model"]}}
        self.strategy.load_state(self.optimizer, state)
        drop_gathered(self.strategy.model)
        if self.outer:
            self.outer.restore(state, step)
        self._restored = state.get(OBJECTS, {})
        self.adopt(self.objects)

    def without_gradient(self) -> list[str]:
        """Return the names of unused weights; ConfigError if forward() has made new weights."""
        named = dict(self.strategy.trained.named_parameters())
        if late := [*(named.keys() - self._weights)]:
            raise ConfigError(
                f"model.name={self._config.model.name}: the first forward() made "
                f"{listed(late)}, which no optimizer knows; make weights in __init__()"
            )
        turn = self.objective.loss.turn  # of the step, which trains its weights alone
        trained = {name: weight for name, weight in named.items() if weight.requires_grad}
        unused = [name for name, weight in trained.items() if weight.grad is None]
        return [name for name in unused if not turn or name.startswith(f"{turn}.")]


def drop_frozen(model: nn.Module, state: dict[str, Any]) -> None:
    """Leave out the parameters that are not trained, for `checkpoint.save_frozen=false`."""
    named = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, weight in named if not weight.requires_grad}
    for part in {"model", "ema"} & state.keys():
        state[part] = {name: one for name, one in state[part].items() if name not in frozen}


@dataclass
class Kept:
    """The state of a rank in memory, and the facts that a checkpoint of its step would have."""

    step: int = -1  # -1 if it has none
    state: dict[str, Any] | None = None
    facts: Mapping[str, Any] | None = None


def hand_over(kept: Kept, state: TrainingState, world: World) -> tuple[int, Mapping[str, Any]]:
    """Give all ranks the newest state that one has kept; return its step and facts."""
    steps = world.gather(torch.tensor([kept.step])).flatten().tolist()
    newest = max(steps)
    if newest < 0:
        raise RuntimeError("no rank has kept a whole state, so all restart from the checkpoint")
    source, filled = steps.index(newest), state.read_alone()
    tensors, values = chunks(filled)
    if kept.step == newest and kept.state is not None:
        theirs, values = chunks(kept.state)
        parts = {(chunk.key, chunk.offset): part for chunk, part in theirs}
        for chunk, part in tensors:
            part.copy_(parts[chunk.key, chunk.offset])
        kept.state = None  # it would need memory until the end
    if min(steps) < newest:
        for _, part in tensors:
            whole = part.contiguous()
            dist.broadcast(whole, source)
            part.copy_(whole)
        values = world.broadcast(values, source)
    for key, value in values:
        put(filled, key, value)
    state.load(filled, newest)
    return newest, world.broadcast(kept.facts, source)
