"""Optimizers, their groups of parameters, several as one, and Muon for sharded weights."""

import fnmatch
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor, Replicate, Shard

from rollcall.config import arguments
from rollcall.config.schema import ConfigError, Optim
from rollcall.messages.text import did_you_mean, listed
from rollcall.train import torch_private

Groups = list[dict[str, Any]]
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
"""Flat names (state.<parameter>.<quantity>) do not depend on the strategy, mesh or world size."""
MUON = "muon"
DECAYS = {"weight_decay", "lambd"}
"""Options of a group with which a step changes weights whose gradient is zero."""
COUNTERS = {"step": 0.0, "mu_product": 1.0, "mu": 1.0}
"""Parts of a state that a step changes even with a gradient of zero, and what they begin with."""
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "auto": {},
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "single": {"foreach": False, "fused": False},
}


def check_groups(config: Optim, names: Collection[str]) -> None:
    """Raise ConfigError if a pattern of `optim.groups` matches no weight of the whole model."""
    for pattern, options in config.groups.items():
        if "params" in options:
            raise ConfigError(
                f"optim.groups: the pattern '{pattern}' chooses the weights; remove params"
            )
        if not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"optim.groups: no weight has a name like '{pattern}'"
                f"{did_you_mean(pattern, names) or f'; the first is {next(iter(names), None)}'}"
            )


def groups(
    config: Optim,
    parameters: Iterable[nn.Parameter],
    names: Mapping[nn.Parameter, str],
    stacks: Collection[nn.Parameter] = (),
) -> Iterator[dict[str, Any]]:
    """Yield groups of parameters by the first pattern of `optim.groups` that fits their names.

    `optim.decay_params=matrices` divides those without their own `weight_decay`. Muon is for
    matrices, and for `stacks` of them along a first dimension; a group of others names `adamw`.
    """
    is_muon = config.name.lower() == MUON

    def is_matrix(weight: nn.Parameter) -> bool:
        return weight.ndim == (3 if weight in stacks else 2)

    found: dict[tuple[str, bool, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        fits = (one for one in config.groups if fnmatch.fnmatch(names[parameter], one))
        decays = parameter.ndim > 1 + (parameter in stacks) or config.decay_params == "all"
        key = next(fits, ""), decays, is_matrix(parameter) or not is_muon
        found.setdefault(key, []).append(parameter)
    is_combined = is_muon or any("optimizer" in options for options in config.groups.values())
    for (pattern, decays, is_for_muon), members in found.items():
        options = {**({} if decays else {"weight_decay": 0.0}), **config.groups.get(pattern, {})}
        if is_combined:
            options.setdefault("optimizer", config.name if is_for_muon else "adamw")
        others = [names[weight] for weight in members if not is_matrix(weight)]
        if others and options.get("optimizer", "").lower() == MUON:
            raise ConfigError(
                f"optim.groups: the pattern '{pattern}' gives {listed(others)} to muon, which "
                "updates matrices; choose adamw for such weights, or another pattern"
            )
        yield {"params": members, **options}


def build(config: Optim, groups: Groups) -> torch.optim.Optimizer:
    """Return an optimizer of groups, combined if they name several; ConfigError if unknown."""
    numbers_of: dict[str, list[int]] = {}  # the groups of each optimizer
    for number, group in enumerate(groups):
        numbers_of.setdefault(group.get("optimizer", config.name), []).append(number)
    parts = [
        (numbers, _build(config, name, [groups[number] for number in numbers]))
        for name, numbers in numbers_of.items()
    ]
    is_muon = any(isinstance(part, torch.optim.Muon) for _, part in parts)
    return Combined(parts) if is_muon or len(parts) > 1 else parts[0][1]


def _build(config: Optim, name: str, groups: Groups) -> torch.optim.Optimizer:
    given: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    given |= _implementation(config, name, groups)
    if name == "sgd":
        given["momentum"] = config.momentum
    args = config.args if name == config.name else {}
    given |= {"config": config, "params": groups}
    if is_muon := name.lower() == MUON:  # it refuses stacks of matrices when it is made
        small = [[w.new_empty(1, 1) if w.ndim > 2 else w for w in g["params"]] for g in groups]
        given["params"] = [{**group, "params": ws} for group, ws in zip(groups, small, strict=True)]
    try:
        optimizer = arguments.call("optim.name", "optim.args", name, args, **given)
        if ":" not in name:
            _try_step(optimizer, groups)
    except Exception as error:
        if ":" in name or isinstance(error, ConfigError):  # a traceback helps there
            raise
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(
            f"optim.name={name} cannot make a step with these optim.args and optim.groups: "
            f"{reason}; change them, or choose another optimizer"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        got = f"got a {type(optimizer).__name__}"
        raise ConfigError(f"optim.name={name}: expected a torch.optim.Optimizer, {got}")
    for made, group in zip(optimizer.param_groups, groups, strict=True) if is_muon else ():
        made["params"] = group["params"]
    options = {option for group in groups for option in group} - {"params", "optimizer"}
    for option in sorted(options - {*optimizer.defaults}):
        known = ", ".join(optimizer.defaults)
        raise ConfigError(
            f"optim.groups: {name} has no option '{option}'"
            f"{did_you_mean(option, optimizer.defaults) or f'; it has {known}'}"
        )
    if name == "sgd" and optimizer.defaults.get("fused") and config.momentum:
        # A skipped first step of the fused kernel leaves momentum uninitialized (2.15).
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _try_step(optimizer: torch.optim.Optimizer, groups: Groups) -> None:
    """Let an optimizer of this kind, with the options of each group, update a small weight."""
    for group in groups:
        weight = next((weight for weight in group["params"] if weight.requires_grad), None)
        if weight is None or weight.is_meta:
            continue
        trial = nn.Parameter(torch.ones(2, 2, dtype=weight.dtype, device=weight.device))
        trial.grad = torch.ones_like(trial)
        # As arguments, because torch does not check the numbers in a group.
        takes = inspect.signature(type(optimizer)).parameters
        given = {**optimizer.defaults, **group, "params": [trial]}
        type(optimizer)(**{key: given[key] for key in given if key in takes}).step()


def _implementation(config: Optim, name: str, groups: Groups) -> dict[str, Any]:
    weights = [one for group in groups for one in group["params"]]
    devices = {one.device.type for one in weights}
    # Fused kernels refuse complex weights and, of other optimizers, sparse gradients.
    is_adam = name.lower() in ("adam", "adamw") and all(one.is_floating_point() for one in weights)
    is_fused = devices == {"cuda"} or (devices == {"cpu"} and is_adam)
    is_fused = is_fused and config.implementation == "auto"
    return IMPLEMENTATIONS["fused" if is_fused else config.implementation]


@contextmanager
def own_options(config: Optim, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep the options of this run while a state is loaded, which has options of an earlier one."""
    named = {"weight_decay", "momentum", *IMPLEMENTATIONS["single"]}
    named = named.union(config.args, *config.groups.values())
    # Torch's optimizers do not change options. Others may, so of theirs only these are kept.
    is_torch = type(optimizer).__module__.startswith("torch.")
    kept = [
        {name: group[name] for name in (group if is_torch else named & group.keys())}
        for group in optimizer.param_groups
    ]
    yield
    for group, options in zip(optimizer.param_groups, kept, strict=True):
        group.update(options)


def check_state(config: Optim, optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if checkpoints cannot hold what an optimizer keeps of a weight."""
    for name, value in (one for state in optimizer.state.values() for one in state.items()):
        is_sparse = isinstance(value, torch.Tensor) and value.layout is not torch.strided
        if is_sparse or not isinstance(value, torch.Tensor | int | float | dict):
            kind = "sparse tensor" if is_sparse else type(value).__name__
            raise ConfigError(
                f"optim.name={config.name}: its state has '{name}', a {kind}; let it hold dense "
                "tensors and numbers alone, which checkpoints can store"
                f"{', with sparse=False in the embedding' if is_sparse else ''}"
            )


def complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Initialize the state of weights never updated, so that all checkpoints hold the same."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    lacking = [one for one in weights if one.requires_grad and not optimizer.state.get(one)]
    is_plain = isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["momentum"] == 0
    if not lacking or is_plain:  # plain SGD has no state
        return
    gradients = [weight.grad for weight in weights]
    # torch's optimizers do not move on a gradient of zero without decay; others may.
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    before = [] if is_torchs else [weight.detach().clone() for weight in weights]
    decays = [{key: group[key] for key in DECAYS & {*group}} for group in optimizer.param_groups]
    for weight in weights:
        weight.grad = None
    for weight in lacking:
        weight.grad = torch.zeros_like(weight)
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group.update(dict.fromkeys(decay, 0.0))
    optimizer.step()
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group.update(decay)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    for weight, copy in zip(weights, before, strict=not is_torchs):
        weight.data.copy_(copy)
    for weight in lacking:
        for name, value in optimizer.state[weight].items():
            if name in COUNTERS and isinstance(value, torch.Tensor):
                value.fill_(COUNTERS[name])
            elif name in COUNTERS:
                optimizer.state[weight][name] = type(value)(COUNTERS[name])


class Combined(torch.optim.Optimizer):
    """Steps several optimizers. Groups and state are theirs, in the order of the given groups."""

    def __init__(self, parts: Sequence[tuple[list[int], torch.optim.Optimizer]]) -> None:
        self._parts = [(places, part) for places, part in parts if places]
        groups: dict[int, dict[str, Any]] = {}
        for places, part in self._parts:
            groups |= zip(places, part.param_groups, strict=True)
        super().__init__([dict(groups[place]) for place in sorted(groups)], {})
        self._share()

    def _share(self) -> None:
        for places, part in self._parts:
            part.state = self.state
            part.param_groups = [self.param_groups[place] for place in places]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Let each optimizer update its parameters."""
        assert closure is None, "a training step has no closure"
        for _, part in self._parts:
            with _matrix_by_matrix(part) if isinstance(part, torch.optim.Muon) else nullcontext():
                part.step()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state of all."""
        super().load_state_dict(state_dict)
        self._share()


@contextmanager
def _matrix_by_matrix(optimizer: torch.optim.Muon) -> Iterator[None]:
    """Let Muon update whole matrices, parts of a stack as views of the weight and of its state."""
    groups, state, views = optimizer.param_groups, optimizer.state, list[torch.Tensor]()
    whole = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [weight for weight in group["params"] if weight.ndim == 2]
    for group, weights in zip(groups, whole, strict=True):
        for weight in (weight for weight in weights if weight.ndim > 2 and weight.grad is not None):
            if not state[weight]:
                state[weight]["momentum_buffer"] = torch.zeros_like(weight.grad)
            parts = weight.detach(), weight.grad, state[weight]["momentum_buffer"]
            for view, gradient, momentum in zip(*map(_matrices, parts), strict=True):
                view.grad, state[view] = gradient, {"momentum_buffer": momentum}
                group["params"].append(view)
                views.append(view)
    try:
        with torch_private.muon_replaced(_of_whole):
            yield
    finally:
        for group, weights in zip(groups, whole, strict=True):
            group["params"] = weights
        for view in views:
            del state[view]


def _matrices(stack: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return those matrices of a stack that are here; shards of them if ranks share each."""
    if not isinstance(stack, DTensor):
        return stack.unbind()
    mesh, local = stack.device_mesh, stack.to_local().unbind()
    for number, placement in enumerate(stack.placements):
        if isinstance(placement, Shard) and placement.dim:
            shared = mesh[mesh.mesh_dim_names[number]] if mesh.mesh_dim_names else mesh
            cut = [Shard(placement.dim - 1)]
            return [DTensor.from_local(part, shared, cut, run_check=False) for part in local]
    return local


def _of_whole(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Let torch's Muon orthogonalize whole matrices where it holds shards of them.

    Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) multiplies a matrix with itself
    in bf16, so that pieces would round in another way. Each rank gathers the update of one matrix
    at a time, computes the same as one process would, and keeps its shard.
    """

    @wraps(function)
    def gathered(update: torch.Tensor, *options: Any) -> torch.Tensor:
        if not isinstance(update, DTensor):
            return function(update, *options)
        mesh, everywhere = update.device_mesh, [Replicate()] * update.device_mesh.ndim
        found = function(update.full_tensor(), *options)
        shared = DTensor.from_local(found, mesh, everywhere, run_check=False)
        return shared.redistribute(mesh, update.placements)

    return gathered
