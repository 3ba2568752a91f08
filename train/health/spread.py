"""Compare the spread model with the plain one before the first step of a run.

Two samples pass through the plain model on every rank and then through the spread one, without
dropout: outputs, loss and gradients must agree. Then they pass with dropout, and the ranks of a
tensor group must agree wherever they compute the same. Nothing remains of these passes.
"""

import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from rollcall.config.mesh import parse
from rollcall.text import size
from rollcall.train.data.source import Batch
from rollcall.train.dist.run import Run
from rollcall.train.health import crosscheck
from rollcall.train.numerics.randomness import kept, set_seed
from rollcall.train.parallel.part import evaluating
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.recovery import memory

EVENT = "spread_checked"
SLACK = 16
"""How many times the expected rounding error of a sum a difference may be."""
CALLS = 4
"""Calls of a module that are compared; more are repetitions, as for micro-batches."""
Whole = Callable[[nn.Module, torch.device], AbstractContextManager[None]]


class Sketch(NamedTuple):
    """A tensor, multiplied by fixed numbers and summed over its last dimension."""

    shape: torch.Size
    sums: torch.Tensor
    norm: float
    turn: int = 0  # of outputs: the number of the call in the pass


class Pass(NamedTuple):
    """The sketches of a forward and backward pass, by the names of modules and weights."""

    outputs: dict[str, list[Sketch]]
    gradients: dict[str, Sketch]
    loss: float


class Spread:
    """The comparison for one run on one rank; every rank makes each call together."""

    def __init__(self, run: Run, strategy: Strategy, example: Batch) -> None:
        self._run, self._world = run, run.world
        self._strategy, self.example = strategy, example
        self._plain: Pass | None = None  # None if there is nothing to compare
        self._tolerance = 0.0
        self._key = ""
        self._has_passed = False

    def compute_plain(self, model: nn.Module, whole: Whole) -> None:
        """Pass the samples through the model before it is spread, if it has to be compared.

        `whole` gives it all its values within a context.

        Raises:
            ConfigError: on every rank, if their models differ.
        """
        config, world = self._run.config, self._world
        is_off = config.parallel.check == "off" or world.world_size == 1
        if is_off or not self._strategy.changes_passes:
            return
        self._key = _digest(self._run)
        if world.broadcast(self._is_known()):
            return
        self._tolerance = _tolerance(model, self._strategy.rounds)
        reason = world.first_problem(self._obstacle(model))
        reason = reason or world.first_problem(self._compute_plain(model, whole))
        if reason:
            self._plain = None
            self._run.say(f"rollcall: parallel.check was left out for the plain model: {reason}")
        else:
            world.raise_together(self._different_weights())

    def compare(self) -> None:
        """Pass the samples through the spread model; ConfigError on all ranks if it differs."""
        if (plain := self._plain) is None:
            return
        strategy = self._strategy
        model = strategy.model
        try:
            with _without_trace(model, self._world.device):
                with evaluating(model):
                    found = self._pass(model, strategy.example_pass)
                    self._refuse_difference(plain, found)
                if strategy.copies > 1:
                    model.zero_grad()
                    found = self._pass(model, strategy.example_pass)
                    self._world.raise_together(self._disagreement(plain, found))
        except (MemoryError, RuntimeError) as error:
            if not memory.is_exhausted(error):
                raise
            raise MemoryError(
                "too little memory to compare the spread model with the plain one: set "
                "parallel.check=off"
            ) from error
        finally:
            model.zero_grad()
            self._plain = None
        self._has_passed = True

    def record(self) -> None:
        """Record in the run directory what was compared, so that a restart need not."""
        if self._has_passed:
            self._run.record(EVENT, key=self._key)

    def _is_known(self) -> bool:
        events = self._run.run_dir.read_events(EVENT) if self._world.is_main else []
        return bool(events) and events[-1].get("key") == self._key

    def _obstacle(self, model: nn.Module) -> str:
        """Return why the models cannot be compared, or an empty string."""
        config, world = self._run.config, self._world
        if config.precision == "fp8":
            return "precision=fp8 scales each piece of a tensor by its own largest number"
        if config.parallel.compression != "none":
            return f"parallel.compression={config.parallel.compression} changes the gradients"
        needed = 2 * sum(weight.nbytes for weight in model.parameters())
        free = memory.free(world)
        if 2 * needed > free:
            return (
                f"its weights and gradients take {size(needed)}, more than half of the "
                f"{size(free)} that rank {world.rank} has free"
            )
        return ""

    def _compute_plain(self, model: nn.Module, whole: Whole) -> str:
        """Pass the samples through the plain model; return why that failed, or an empty string."""
        device = self._world.device
        try:
            with whole(model, device), _without_trace(model, device), evaluating(model):
                set_seed(self._run.config.seed, "check")
                undrawn = _next_numbers(device)
                self._plain = self._pass(model, self._strategy.plain_pass, model)
                drawn = _next_numbers(device)
        except (MemoryError, RuntimeError) as error:
            if not memory.is_exhausted(error):
                raise
            return f"rank {self._world.rank} has too little memory for it"
        finally:
            model.zero_grad()
        if drawn != undrawn:
            return "the model draws random numbers even without dropout"
        return "" if math.isfinite(self._plain.loss) else "its loss is not finite"

    def _pass(self, model: nn.Module, compute: Callable[..., torch.Tensor], *what: Any) -> Pass:
        set_seed(self._run.config.seed, "check")
        with _outputs(model) as found:
            loss = compute(*what, self.example.to(self._world.device))
        return Pass(found, _gradients(model, self._world.device), float(loss))

    def _different_weights(self) -> str:
        """Return a problem if the plain models of the ranks differ."""
        assert self._plain is not None
        world = self._world
        losses = world.gather(torch.tensor([self._plain.loss]))
        if float(losses.max() - losses.min()) <= self._tolerance * float(losses.abs().max()):
            return ""
        return (
            f"the ranks built different models, whose losses are {float(losses.min()):.6g} to "
            f"{float(losses.max()):.6g}: draw initial weights only from the generators of torch, "
            "NumPy and Python, without seeding them"
        )

    def _refuse_difference(self, plain: Pass, spread: Pass) -> None:
        """Raise ConfigError on every rank if the spread model computes something else."""
        wrong = self._difference(plain, spread)
        module = self._first_different(plain, spread)
        if module == "":  # the output of the model itself, although no inner module differs
            wrong = wrong or "its output differs"
        first = f", first in the output of {module or 'the model'}" * (module is not None)
        problem = wrong and (
            f"{self._run.config.parallel.choice} computes something else than one rank would: "
            f"{wrong}{first} on rank {self._world.rank}; look for "
            f"{' or '.join(self._strategy.suspicions)}; or set parallel.check=off to train anyway"
        )
        # What a rank sees in a module comes first, and then what all ranks see in the sum.
        self._world.raise_together(problem if module else "")
        self._world.raise_together(problem)

    def _difference(self, plain: Pass, spread: Pass) -> str:
        """Return what differs in the result: loss, norm or a gradient; or an empty string."""
        total = math.sqrt(sum(sketch.norm**2 for sketch in plain.gradients.values())) or 1
        norm = float(self._strategy.clip(None))
        errors = {
            "its loss": abs(spread.loss - plain.loss) / (abs(plain.loss) or 1),
            "the norm of its gradient": abs(norm - total) / total,
        }
        for name, sketch in spread.gradients.items():
            difference = float((sketch.sums - plain.gradients[name].sums).norm())
            errors[f"the gradient of {name}"] = difference / total
        for what, error in errors.items():
            if not error <= self._tolerance:
                return f"{what} differs by {error:.1e} of its size"
        return ""

    def _first_different(self, plain: Pass, spread: Pass) -> str | None:
        """Return the module whose call was the first with another output; None if all agree."""
        turns = {
            whole.turn: name
            for name, calls in plain.outputs.items()
            for whole, mine in zip(calls, spread.outputs.get(name, []), strict=False)
            if self._differs(mine, whole)
        }
        return turns[min(turns)] if turns else None

    def _differs(self, mine: Sketch, whole: Sketch) -> bool:
        errors = [float((mine.sums - piece).norm()) for piece in self._pieces(mine, whole)]
        return bool(errors) and not min(errors) <= self._tolerance * whole.norm

    def _pieces(self, mine: Sketch, whole: Sketch) -> Iterator[torch.Tensor]:
        """Yield the pieces of a whole output that this rank may hold; none if that is unknown."""
        if mine.shape == whole.shape:
            yield whole.sums
        elif len(mine.shape) == len(whole.shape) and mine.shape[-1] == whole.shape[-1]:
            sizes = enumerate(zip(mine.shape, whole.shape, strict=True))
            cut = [place for place, (part, full) in sizes if part != full]
            for count, index in self._strategy.pieces if len(cut) == 1 else ():
                if mine.shape[cut[0]] * count == whole.shape[cut[0]]:
                    yield whole.sums.chunk(count, cut[0])[index]

    def _disagreement(self, plain: Pass, spread: Pass) -> str:
        """Return a problem if ranks of a tensor group differ in what all of them compute."""
        strategy = self._strategy
        # A pipeline calls its stages with other inputs too, to learn shapes.
        is_cut = "pipeline" in parse(self._run.config.parallel.mesh_text)
        shared = {
            f"the output of {name or 'the model'}": mine
            for name, calls in (() if is_cut else spread.outputs.items())
            for mine, whole in zip(calls, plain.outputs.get(name, []), strict=False)
            if mine.shape == whole.shape
        }
        weights = dict(strategy.model.named_parameters())
        for name, mine in spread.gradients.items():
            if "tensor" in strategy.alike(weights[name], is_buffer=False):
                shared[f"the gradient of {name}"] = mine
        if not shared:
            return ""
        values = torch.stack([_sketch(mine.sums.flatten()).sums for mine in shared.values()])
        others = strategy.among_copies(values)
        spans = others.amax(0) - others.amin(0)
        for what, span, mine in zip(shared, spans.tolist(), shared.values(), strict=True):
            if not span <= self._tolerance * mine.norm * math.sqrt(mine.sums.numel()):
                return (
                    f"{self._run.config.parallel.choice}: {what} differs between the ranks of a "
                    "tensor group, which all compute it: do not seed generators in the model, and "
                    "keep dropout either between a columns and a rows layer or outside of such "
                    "pairs; or set parallel.check=off to train anyway"
                )
        return ""


@contextmanager
def _outputs(model: nn.Module) -> Iterator[dict[str, list[Sketch]]]:
    """Collect sketches of the outputs of all modules while the context is open."""
    found: dict[str, list[Sketch]] = {}
    turns = itertools.count()

    def collect(name: str, _module: nn.Module, _inputs: object, outputs: Any) -> None:
        if not torch.is_grad_enabled():  # a pipeline looks at the shapes of zeros
            return
        sketches = found.setdefault(name, [])
        for tensor in tree_leaves(outputs):
            if len(sketches) < CALLS and isinstance(tensor, torch.Tensor):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if local.is_floating_point():
                    sketches.append(_sketch(local)._replace(turn=next(turns)))

    modules = model.named_modules()
    hooks = [module.register_forward_hook(partial(collect, name)) for name, module in modules]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _tolerance(model: nn.Module, rounds: bool = False) -> float:
    """Return the relative error that rounding may cause.

    In fp32, a sum of n terms in another order differs by about sqrt(n) * 2^-24 of its size, and the
    errors of layers after each other add up likewise. Sums of 16-bit numbers are made in fp32.
    """
    weights = list(model.parameters())
    layers = sum(1 for _ in model.modules())
    dtypes = [torch.bfloat16] * rounds + [one.dtype for one in weights if one.requires_grad]
    epsilon = max(torch.finfo(dtype).eps for dtype in dtypes) / 2
    terms = max(max(weight.shape, default=1) for weight in weights) if epsilon < 1e-6 else 1
    return SLACK * epsilon * math.sqrt(terms * layers)


def _sketch(tensor: torch.Tensor) -> Sketch:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    rows = tensor.detach().float()
    rows = rows.view(1) if rows.ndim == 0 else rows
    numbers = torch.arange(rows.shape[-1], device=rows.device).cos()
    return Sketch(rows.shape, rows @ numbers, float(rows.norm()))


@torch.no_grad()
def _gradients(model: nn.Module, device: torch.device) -> dict[str, Sketch]:
    """Return sketches of whole gradients; one at a time is gathered."""
    found = {}
    for name, weight in model.named_parameters():
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found[name] = _sketch(whole.to(device))  # offloaded gradients are on the CPU
    return found


@contextmanager
def _without_trace(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers and the state of random numbers at the end."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    cudnn = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False  # its RNNs have no backward pass in evaluation mode
    try:
        with kept(device):
            yield
    finally:
        torch.backends.cudnn.enabled = cudnn
        for buffer, before in buffers:
            buffer.data.copy_(before)


def _next_numbers(device: torch.device) -> list[float]:
    """Return the next random number of each generator, without drawing it."""
    with kept(device):
        generators = {torch.device("cpu"), device}
        return [
            random.random(),
            np.random.random(),
            *(float(torch.rand((), device=each)) for each in generators),
        ]


def _digest(run: Run) -> str:
    """Return a digest of what the comparison depends on."""
    config = run.config
    parts = [config.model.model_dump(), config.parallel.model_dump(), config.train.loss]
    facts = [*parts, run.world.world_size, run.world.place.local_world_size, crosscheck.code()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
