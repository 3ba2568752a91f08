"""The checkpoints of your own training loop: give the objects once, then restore and save."""

import sys
import weakref
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from rollcall.train.checkpoint import engine
from rollcall.train.checkpoint.store import CheckpointStore
from rollcall.train.checkpoint.write_plan import differs
from rollcall.train.numerics import optim
from rollcall.train.ranks.world import World

BEGUN = "begun"
"""The key of the flag that an optimizer has made a step."""
Part = nn.Module | torch.optim.Optimizer | Stateful | dict[str, Any]


class Checkpointer:
    """Saves and restores the objects of your own training loop.

    Every rank makes the same calls in the same order. Use it as a context manager, so that a save
    in the background is finished at the end. A save that failed raises OSError on every rank, in
    the call that learns of it; earlier checkpoints are unchanged.
    """

    def __init__(
        self,
        directory: Path | str,
        world: World,
        *,
        keep: int = 2,
        keep_every: int | None = None,
        **parts: Part,
    ) -> None:
        """Keep the newest `keep` checkpoints, and every step that is a multiple of `keep_every`.

        Args:
            directory: a directory on storage that all ranks see.
            parts: the objects to save, by name: models (plain, DDP or FSDP), their optimizers,
                other objects with `state_dict` and `load_state_dict`, and dictionaries of tensors
                and plain values, which are filled in place.

        Raises:
            TypeError: something cannot be saved.
            ValueError: an optimizer changes parameters that no given model has, or `keep` is 0.
        """
        if keep < 1:
            raise ValueError(f"keep={keep}: expected at least 1, the newest checkpoint")
        self._world = world
        self._engine = engine.Engine(CheckpointStore(Path(directory), world, keep, keep_every))
        self._parts = parts
        self._newest: int | None = None  # the step saved or restored last; None before `restore`
        # Names in an optimizer's state begin with the name of the model.
        self._models = nn.ModuleDict(
            {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
        )
        self._check()
        weakref.finalize(self, _warn_of_unfinished, self._engine)  # also at the end of the process

    def restore(self) -> int:
        """Fill all parts from the newest intact checkpoint and return its step; 0 without one.

        Call it once, before the first `save`, when the models are on their devices and wrapped. It
        also removes what killed processes left half-written.

        Raises:
            ConfigError: the checkpoint belongs to other parts, or none is intact.
        """
        self._engine.clean()
        if restored := engine.restore([self._engine], self._state, complete=True):
            for name, part in self._parts.items():
                self._load(part, restored.state[name])
            if self._world.is_main:
                source = self._engine.store.path_of(restored.step)
                print(f"rollcall: continues from {source}", flush=True)
        self._newest = restored.step if restored else 0
        return self._newest

    def save(self, step: int, *, wait: bool = True) -> None:
        """Save all parts after `step` updates.

        With `wait=False` it returns as soon as later changes cannot reach the checkpoint any more.
        A later call to `poll`, `save` or `close` publishes the checkpoint.

        Raises:
            RuntimeError: `restore` was not called.
            ValueError: a later step is saved already, or ranks hold different values.
            OSError: this save, or the one before it, could not be written.
        """
        if self._newest is None:
            raise RuntimeError("call restore() before save(): it would replace earlier checkpoints")
        if step < self._newest:
            raise ValueError(
                f"save({step}): step {self._newest} is saved already. Start the loop at the step "
                "that restore() returned, or choose another directory"
            )
        self.close()
        # Replicas have different buffers; a resumed run begins with rank 0's.
        for buffer in self._models.buffers():
            if not isinstance(buffer, DTensor):
                dist.broadcast(buffer.data, 0)
        state = self._state()
        self._check_equal(state)
        self._engine.begin(step, state)
        self._newest = step
        if wait:
            self.close()

    def poll(self) -> None:
        """Continue a save in the background, without waiting; OSError if it cannot be written."""
        self._raise(self._engine.wait(0))

    def close(self) -> None:
        """Wait until the save in the background is published; OSError if it cannot be written."""
        self._raise(self._engine.drain())

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self._world.world_size == 1:
            self.close()
        # Otherwise the exception may be on this rank alone, and waiting would take forever.

    @staticmethod
    def _raise(result: engine.SaveResult | None) -> None:
        if result and result.problem:
            raise OSError(f"step {result.step} was not saved: {result.problem}")

    def _check(self) -> None:
        if not self._parts:
            raise TypeError("nothing to save: Checkpointer(directory, world, model=model, ...)")
        known = {id(parameter) for parameter in self._models.parameters()}
        for name, part in self._parts.items():
            if isinstance(part, torch.optim.Optimizer):
                groups = [group["params"] for group in part.param_groups]
                if foreign := sum(id(weight) not in known for weight in chain(*groups)):
                    raise ValueError(
                        f"{name} changes {foreign} parameters that no given model has: give the "
                        "model, too, and create the optimizer after wrapping it"
                    )
            elif not isinstance(part, dict | Stateful):
                raise TypeError(
                    f"{name} is a {type(part).__name__}: expected a model, an optimizer, an object "
                    "with state_dict and load_state_dict, or a dictionary"
                )

    def _state(self) -> dict[str, Any]:
        return {name: self._state_of(part) for name, part in self._parts.items()}

    def _state_of(self, part: Part) -> dict[str, Any]:
        if isinstance(part, nn.Module):
            return state_dict.get_model_state_dict(part)
        if not isinstance(part, torch.optim.Optimizer):
            return part if isinstance(part, dict) else part.state_dict()
        has_begun = bool(part.state)
        optim.complete_state(part)
        state = state_dict.get_optimizer_state_dict(self._models, part, options=optim.OPTIONS)
        if not has_begun:
            part.state.clear()
        return {**state, BEGUN: has_begun}

    def _load(self, part: Part, state: dict[str, Any]) -> None:
        if isinstance(part, nn.Module):
            state_dict.set_model_state_dict(part, state)
        elif isinstance(part, torch.optim.Optimizer):
            has_begun = state.pop(BEGUN)
            optim.complete_state(part)
            state_dict.set_optimizer_state_dict(self._models, part, state, options=optim.OPTIONS)
            if not has_begun:
                part.state.clear()
        elif not isinstance(part, dict):
            part.load_state_dict(state)

    def _check_equal(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            is_named = isinstance(part, nn.Module | torch.optim.Optimizer)
            if not is_named and differs({name: state[name]}, self._world):
                raise ValueError(
                    f"{name} differs between the ranks: keep what is equal on all ranks, and "
                    "derive the rest from the step and the rank"
                )


def _warn_of_unfinished(unfinished: engine.Engine) -> None:
    if unfinished.busy:
        print(
            "rollcall: warning: the last save in the background was not finished, and its "
            "checkpoint does not exist: call close() at the end, or use `with checkpoints:`",
            file=sys.stderr,
        )
