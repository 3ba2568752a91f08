"""Optimizers, their groups of parameters, and the learning rate of each step."""

import fnmatch
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from rollcall.config import arguments
from rollcall.config.schema import Config, ConfigError, Optim
from rollcall.text import did_you_mean
from rollcall.train.numerics.combined import Combined, use_whole_matrices

Groups = list[dict[str, Any]]
MakeOptimizer = Callable[[Optim, Groups], torch.optim.Optimizer]
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
    config: Optim, parameters: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]
) -> Iterator[dict[str, Any]]:
    """Yield groups of parameters by the first pattern of `optim.groups` that fits their names.

    `optim.decay_params=matrices` divides those without their own `weight_decay`. Muon is for
    matrices; a group without them names `adamw`.
    """
    is_muon = config.name.lower() == MUON
    found: dict[tuple[str, bool, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        fits = (one for one in config.groups if fnmatch.fnmatch(names[parameter], one))
        decays = parameter.ndim > 1 or config.decay_params == "all"
        key = next(fits, ""), decays, parameter.ndim == 2 or not is_muon
        found.setdefault(key, []).append(parameter)
    is_combined = is_muon or any("optimizer" in options for options in config.groups.values())
    for (pattern, decays, is_for_muon), members in found.items():
        options = {**({} if decays else {"weight_decay": 0.0}), **config.groups.get(pattern, {})}
        if is_combined:
            options.setdefault("optimizer", config.name if is_for_muon else "adamw")
        yield {"params": members, **options}


def build(config: Optim, groups: Groups) -> torch.optim.Optimizer:
    """Return the optimizer that the configuration names, for groups of parameters.

    Groups may name other optimizers; then they are combined.

    Raises:
        ConfigError: a group has an option that its optimizer does not know.
    """
    names = list(dict.fromkeys(group.get("optimizer", config.name) for group in groups))
    places = {
        name: [n for n, group in enumerate(groups) if group.get("optimizer", config.name) == name]
        for name in names
    }
    parts = [
        (places[name], _build(config, name, [groups[place] for place in places[name]]))
        for name in names
    ]
    return parts[0][1] if len(parts) == 1 else Combined(parts)


def _build(config: Optim, name: str, groups: Groups) -> torch.optim.Optimizer:
    if name.lower() == MUON:
        use_whole_matrices()
    given: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    given |= _implementation(config, name, groups)
    if name == "sgd":
        given["momentum"] = config.momentum
    args = config.args if name == config.name else {}
    made = partial(arguments.call, "optim.name", "optim.args", name, args, config=config, **given)
    with _explained(name):
        optimizer = made(params=groups)
        for group in groups if ":" not in name else ():
            for weight in [one for one in group["params"] if one.requires_grad][:1]:
                if weight.is_meta:
                    continue
                trial = nn.Parameter(torch.ones(2, 2, dtype=weight.dtype, device=weight.device))
                trial.grad = torch.ones_like(trial)
                # As arguments, because torch does not check the numbers in a group.
                takes = inspect.signature(type(optimizer)).parameters
                given = {**optimizer.defaults, **group, "params": [trial]}
                type(optimizer)(**{key: given[key] for key in given if key in takes}).step()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optim.name={name}: expected a torch.optim.Optimizer, got a {type(optimizer).__name__}"
        )
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


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn an error of torch's optimizers into a ConfigError; leave those in user code alone."""
    try:
        yield
    except Exception as error:
        if ":" in name or isinstance(error, ConfigError):
            raise
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(
            f"optim.name={name} cannot make a step with these optim.args and optim.groups: "
            f"{reason}; change them, or choose another optimizer"
        ) from error


def _implementation(config: Optim, name: str, groups: Groups) -> dict[str, Any]:
    """Return the options of torch's optimizers for `optim.implementation`."""
    weights = [one for group in groups for one in group["params"]]
    devices = {one.device.type for one in weights}
    # Fused kernels refuse complex weights and, of other optimizers, sparse gradients.
    is_adam = name.lower() in ("adam", "adamw") and all(one.is_floating_point() for one in weights)
    is_fused = devices == {"cuda"} or (devices == {"cpu"} and is_adam)
    return IMPLEMENTATIONS[
        "fused" if config.implementation == "auto" and is_fused else config.implementation
    ]


def peak(config: Config) -> float:
    """Return the largest learning rate, for this global batch.

    Linear: Goyal et al., https://arxiv.org/abs/1706.02677. Square root, for Adam: Malladi et al.,
    https://arxiv.org/abs/2205.10287.
    """
    if config.optim.base_batch is None:
        return config.optim.lr
    ratio = config.data.global_batch / config.optim.base_batch
    return config.optim.lr * (math.sqrt(ratio) if config.optim.lr_scaling == "sqrt" else ratio)


class Schedule:
    """The learning rate of each step (from 0): linear warm-up, then the schedule.

    It depends on the step alone, so a checkpoint does not save it.
    """

    def __init__(self, config: Config) -> None:
        options = config.optim
        self._config = config
        self._function = arguments.call(
            "optim.schedule", "optim.schedule_args", options.schedule, options.schedule_args
        )
        takes_config = "config" in inspect.signature(self._function).parameters
        self._given = {"config": options} if takes_config else {}

    def __call__(self, step: int, total_steps: int) -> float:
        """Return the rate of a step.

        Raises:
            ConfigError: the user's schedule does not return a number.
        """
        options, highest = self._config.optim, peak(self._config)
        if step < options.warmup_steps:
            return highest * (step + 1) / options.warmup_steps
        after = step - options.warmup_steps, total_steps - options.warmup_steps
        fraction = self._function(*after, **self._given)
        if not isinstance(fraction, Real) or not 0 <= float(fraction) < math.inf:
            raise ConfigError(
                f"optim.schedule={options.schedule}: expected a finite number of at least 0, the "
                f"fraction of the peak rate, for step={after[0]} and steps={after[1]}, got "
                f"{fraction!r}"
            )
        return highest * float(fraction)


def step(optimizer: torch.optim.Optimizer) -> None:
    """Do `optimizer.step()`; of a fused Adam, only what changes the weights.

    The rest of that method takes three times as long as the update of a small model.
    """
    own: Any = optimizer
    hooks = own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks
    is_seen = any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))
    is_seen |= "step" in vars(own)  # somebody has replaced the method, as schedulers of torch do
    is_plain = type(own) in (torch.optim.Adam, torch.optim.AdamW) and not is_seen
    for group in own.param_groups if is_plain else ():
        is_plain &= group["fused"] is True and not group["amsgrad"]
    if not is_plain or torch.autograd._profiler_enabled():  # a profile shows the method
        own.step()
        return
    with torch.no_grad():
        for group in own.param_groups:
            lists: list[list[torch.Tensor]] = [[], [], [], [], [], []]
            own._init_group(group, *lists)
            if lists[0]:
                torch._foreach_add_(lists[-1], 1)
                decoupled, betas = group["decoupled_weight_decay"], group["betas"]
                options = {name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")}
                options |= {"beta1": betas[0], "beta2": betas[1], "amsgrad": False}
                (torch._fused_adamw_ if decoupled else torch._fused_adam_)(*lists, **options)


def ratios(config: Optim, optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rate of each group of a new optimizer, relative to `optim.lr`."""
    return [group.get("lr", config.lr) / config.lr for group in optimizer.param_groups]


def set_learning_rate(
    optimizer: torch.optim.Optimizer, rate: float, ratios: Sequence[float]
) -> None:
    """Use this learning rate, times the ratio of each group, for the next update."""
    for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
        group["lr"] = rate * ratio


@contextmanager
def own_options(config: Optim, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep the options of this run while a state is loaded, which has those of an earlier one."""
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
        if not isinstance(value, torch.Tensor | int | float | dict):
            raise ConfigError(
                f"optim.name={config.name}: its state has '{name}', a {type(value).__name__}; let "
                "it hold tensors and numbers alone, which checkpoints can store"
            )


def complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Give each weight that was never updated the state with which its first update begins.

    A checkpoint then holds the same tensors whether or not a loss has used all weights. The weights
    do not change.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    lacking = [one for one in weights if one.requires_grad and not optimizer.state.get(one)]
    if not lacking or optimizer.defaults.get("momentum") == 0:  # plain SGD has no state
        return
    gradients = [weight.grad for weight in weights]
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
    for weight in lacking:
        for name, value in optimizer.state[weight].items():
            if name in COUNTERS and isinstance(value, torch.Tensor):
                value.fill_(COUNTERS[name])
