"""Try an optimizer on small weights before a run: sharded, saved and resumed.

The steps must be those with whole weights in options go. Optimizers whose steps are tested, such as
AdamW, are not tried.
"""

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rollcall.config.schema import ConfigError, Optim
from rollcall.train.numerics import optim
from rollcall.train.numerics.optim import OPTIONS
from rollcall.train.numerics.randomness import kept, set_seed
from rollcall.train.ranks.device import whole_of
from rollcall.train.ranks.meeting import Failed, Meeting
from rollcall.train.ranks.world import World

TESTED = {"adam", "adamw", "muon", "sgd"}
STEPS, FIRST = 4, 2
"""Steps of a trial, and steps before its save."""
TOLERANCE, ROUNDING = 1e-3, 1e-6
"""The largest difference, as a share of what the steps change and of the weights."""
RESUMED = "after a save and a resume", "let it keep what it remembers in self.state of each weight"
SHARDED = "with sharded weights", "choose ddp or zero1, or let it use full_tensor()"
FILLED = (
    "for weights that the loss had not used before a save",
    "the save makes a step with gradients of zero, which must not change its state",
)
UNTRIED = "was not tried before the run"
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Weights before and after the steps."""


def check(
    config: Optim, world: World, mesh: DeviceMesh | None, model: nn.Module
) -> tuple[str, str]:
    """Return the reason to refuse a run and a warning, on all ranks; empty if all is well."""
    refusal = warning = ""
    rows = [w for w in model.parameters() if w.requires_grad and w.ndim > 1 and len(w) == 1]
    has_row = any(isinstance(w, DTensor) and any(p.is_shard() for p in w.placements) for w in rows)
    names = [config.name, *(group.get("optimizer", "sgd") for group in config.groups.values())]
    for name in dict.fromkeys(names):
        if name.lower() not in TESTED and not refusal:
            args = config.args if name == config.name else {}
            options = config.model_copy(update={"name": name, "groups": {}, "args": args})
            steps = partial(_steps, options, world.device, mesh, has_row)
            refusal = _problem(world, steps, name, RESUMED, resumes=True)
            if mesh and not refusal:
                refusal = _problem(world, steps, name, SHARDED, shards=True)
            warning = warning or _problem(world, steps, name, FILLED, fills=True)
    return refusal, warning


def _problem(
    world: World, steps: Callable[..., Pairs], name: str, case: tuple[str, str], **variant: bool
) -> str:
    """Return in words how the steps of a variant differ on a rank; empty if they do not."""
    when, advice = case
    is_late, problem, fails = "fills" in variant, "", UNTRIED
    meeting = Meeting(world)
    try:
        with meeting.attempt():
            whole, noisy = (steps(is_late=is_late, seed=seed) for seed in range(2))
            fails, advice = f"fails {when}", f"; {advice}"
            with meeting:
                pairs = steps(is_late=is_late, **variant)
    except Failed:
        pass
    except ConfigError as error:
        problem = str(error)
    except Exception as error:  # the code may raise anything, also since the weights are small
        reason = (str(error) or type(error).__name__).strip().splitlines()[0].rstrip(".")
        problem = f"optim.name={name} {fails}: {reason}{advice * (fails != UNTRIED)}"
    if problem := world.first_problem(problem):  # none waits for one that has failed
        return problem if is_late or UNTRIED not in problem else ""
    difference = _difference(whole, pairs)
    if difference and not _difference(whole, noisy):  # as Langevin dynamics adds noise
        problem = f"optim.name={name}: {when} its steps differ by {difference:.1e} of their size"
    return world.first_problem(problem and f"{problem}{advice}")


def _steps(
    config: Optim,
    device: torch.device,
    mesh: DeviceMesh | None,
    has_row: bool,
    seed: int = 0,
    is_late: bool = False,  # the last weight is not used before the save
    **variant: bool,
) -> Pairs:
    """Return small weights before and after some steps; shards stay shards."""
    drawn, rows = torch.Generator().manual_seed(0), 12 * (mesh.size() if mesh else 1)

    def numbers() -> list[torch.Tensor]:
        # Of several sizes: a factor may depend on a norm between limits.
        row = [((1, 3), 1.0)] if has_row else []  # DTensor cannot do everything with a single one
        shapes = [*row, ((rows, 3), 0.1), ((rows, 3), 1.0), ((rows,), 1.0), ((rows, 2), 0.01)]
        draw = partial(torch.randn, generator=drawn)
        tensors = [scale * draw(shape).to(device) for shape, scale in shapes]
        if mesh and "shards" in variant:
            return [distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in tensors]
        return tensors

    def make(values: Iterable[torch.Tensor]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ParameterList([nn.Parameter(value.detach().clone()) for value in values])
        names = {weight: name for name, weight in model.named_parameters()}
        return model, optim.build(config, [*optim.groups(config, names, names)])

    first = numbers()
    model, optimizer = make(first)
    with kept(device):
        set_seed(seed, "trial")
        for step in range(STEPS):
            if step == FIRST and "fills" in variant:
                optim.complete_state(optimizer)
            if step == FIRST and "resumes" in variant:
                optim.check_state(config, optimizer)
                state = state_dict.get_optimizer_state_dict(model, optimizer, options=OPTIONS)
                state = copy.deepcopy(state)
                model, optimizer = make(model.parameters())
                optim.complete_state(optimizer)
                state_dict.set_optimizer_state_dict(model, optimizer, state, options=OPTIONS)
            for weight, gradient in zip(model.parameters(), numbers(), strict=True):
                weight.grad = gradient
            if is_late and step < FIRST:
                weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(first, model.parameters(), strict=True)
    return [(before, after.detach()) for before, after in pairs]


def _difference(whole: Pairs, other: Pairs) -> float:
    """Return the largest difference as a share of what the steps have changed; 0 if it is small."""
    largest = 0.0
    for (before, after), (_, compared) in zip(whole, other, strict=True):
        change, error = float((after - before).norm()), float((whole_of(compared) - after).norm())
        if math.isfinite(change) and not error <= TOLERANCE * change + ROUNDING * after.norm():
            largest = max(largest, error / (change or 1)) if math.isfinite(error) else math.inf
    return largest
