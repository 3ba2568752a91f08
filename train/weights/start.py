"""The tensors of a new run: on the meta device until the model is spread over the ranks.

A tensor starts from `model.init` if it is stored there, and from random numbers otherwise.
"""

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from rollcall.config import Config, ConfigError
from rollcall.text import listed, size
from rollcall.train.dist.run import Run
from rollcall.train.dist.world import World
from rollcall.train.weights import deferred, stored
from rollcall.train.weights.deferred import tensors_of
from rollcall.train.weights.stored import Stored, copy_parts

ADAPTED, ADAPTER = ".base_layer", ".lora_"
"""Parts of the names of weights in a model of peft."""
SHOWN = 6
"""Names of tensors in a message."""
NO_HOLDERS = torch.Tensor, type, ModuleType  # objects whose attributes are not of the model


class Start:
    """A model, and what its tensors start from."""

    def __init__(
        self, model: nn.Module, recorder: deferred.Recorder | None, draws: bool = True
    ) -> None:
        """Take a model that `deferred.build` has made; without a recorder it has all values.

        Without `draws`, a checkpoint will fill what checkpoints hold.
        """
        self.model = model
        self._later = set() if draws else set(model.state_dict(keep_vars=True))
        self.reason = ""  # why it has them
        self.report = ""  # what starts from stored tensors
        self._recorder = recorder
        self._stored: Stored | None = None
        self._names: dict[str, str] = {}  # in the model: the name in the files
        self._recorded: dict[str, torch.Tensor] = {}
        if recorder is not None:
            found = [(names, tensor) for names, tensor in tensors_of(model)]
            self._recorded = {name: tensor for names, tensor in found for name in names}
            _fill_attributes(model, recorder)
            self.release(model)

    def read_from(self, source: Stored, names: Mapping[str, str]) -> None:
        """Let tensors (by their names in the model) start from stored ones (by their names)."""
        self._stored, self._names = source, dict(names)
        if self._recorder is None:
            self._load({names[0]: tensor for names, tensor in tensors_of(self.model)})

    def fill(self, model: nn.Module, device: torch.device, buffers: torch.device) -> None:
        """Give the tensors of a spread model memory and the values of this rank's part.

        Args:
            model: this rank's part of the model, whose tensors may be DTensors.
            device: for the weights.
            buffers: the device of buffers.
        """
        wanted: dict[str, torch.Tensor] = {}
        for names, tensor in list(tensors_of(model)):
            if tensor.device.type == "meta":
                place = device if isinstance(tensor, nn.Parameter) else buffers
                full = torch.empty_like(tensor.detach(), device=place)
                replace(model, names, tensor, full)
                wanted[names[0]] = full
        loaded = self._load(wanted)
        assert self._recorder is not None or not wanted, "only a deferred model has no values"
        for name, tensor in wanted.items():
            if name not in loaded | self._later and self._recorder is not None:
                copy_parts(self._recorder.values(self._recorded[name]), tensor)

    def release(self, model: nn.Module) -> None:
        """Return the memory of all tensors; they are on the meta device again."""
        for names, tensor in list(tensors_of(model)):
            if tensor.device.type != "meta":
                replace(model, names, tensor, tensor.detach().to("meta"))

    @contextmanager
    def whole(self, model: nn.Module, device: torch.device) -> Iterator[None]:
        """Give the model all its values, on a device, within this context."""
        try:
            if self._recorder is None:
                model.to(device)
            else:
                self.fill(model, device, device)
            yield
        finally:
            if self._recorder is None:
                model.cpu()  # the parts expect it there
            else:
                self.release(model)

    def _load(self, wanted: Mapping[str, torch.Tensor]) -> set[str]:
        """Fill the tensors that are stored; return their names in the model."""
        found = {name for name in wanted if name in self._names}
        if self._stored is not None and found:
            targets = [(self._names[name], wanted[name].detach()) for name in found]
            first = dict(targets)
            with torch.no_grad():
                self._stored.fill(first)
                for name, target in targets:  # one stored tensor may be several of the model's
                    if target is not first[name]:
                        target.copy_(first[name])
        return found


def replace(
    model: nn.Module, names: Iterable[str], old: torch.Tensor, values: torch.Tensor
) -> None:
    """Put a tensor into all places of another; it stays a parameter with the same attributes."""
    new: Any = values
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(values, requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)
    for name in names:
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        (module._parameters if isinstance(old, nn.Parameter) else module._buffers)[leaf] = new


def built(config: Config, make: Callable[[], nn.Module], draws: bool = True) -> Start:
    """Build a model and freeze parts; raise ConfigError if a pattern of `model.freeze` is wrong."""
    model, recorder, reason = deferred.build(make, config.seed)
    for names, tensor in tensors_of(model) if recorder is None else ():
        if tensor.is_meta:
            raise ConfigError(
                f"model.name={config.model.name}: {names[0]} is on the meta device, and nothing "
                "sets its values; build the model on the CPU: a rank gets only what it holds anyway"
            )
    freeze(model, config)
    _check_attributes(model, config.model.name)
    found = Start(model, recorder, draws)
    found.reason = reason
    return found


def start(run: Run, make: Callable[[], nn.Module]) -> Start:
    """Build the model of a run, freeze parts, and find where its tensors start from.

    Every rank calls this together. A run that continues from a checkpoint does not need
    `model.init` any more.

    Raises:
        ConfigError: on all ranks; `model.init` cannot be read or does not fit the model, or a
            pattern fits nothing.
    """
    config, world = run.config, run.world
    found = built(config, make)
    if found.reason:
        run.say(f"rollcall: every rank builds the whole model first: {found.reason}")
    has_checkpoint = world.is_main and any(run.run_dir.checkpoints.glob("step-*"))
    resumes = world.broadcast(has_checkpoint)
    if config.model.init is not None and not (resumes and config.checkpoint.save_frozen):
        read_init(found, config, world)
        run.say(f"rollcall: model.init={config.model.init}: {found.report}")
    return found


def read_init(found: Start, config: Config, world: World) -> None:
    """Let a model start from `model.init`; raise ConfigError on all ranks if that does not fit."""
    problem = ""
    try:
        source = stored.open_(str(config.model.init), config.model.name)
        names = match(found.model, source.shapes, config)
        found.report = describe(found.model, source, names)
        found.read_from(source, names)
    except ConfigError as error:
        problem = str(error)
    world.raise_together(problem)


def freeze(model: nn.Module, config: Config) -> None:
    """Exclude the parameters that `model.freeze` names from training.

    Raises:
        ConfigError: a pattern fits no parameter, or nothing is left to train.
    """
    for pattern in split(config.model.freeze):
        fitting = [one for name, one in model.named_parameters() if fnmatch.fnmatch(name, pattern)]
        if not fitting:
            raise ConfigError(
                _fits_nothing("model.freeze", pattern, dict(model.named_parameters()))
            )
        for parameter in fitting:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"model.freeze={config.model.freeze} freezes the whole model, so nothing can be trained"
            if config.model.freeze is not None
            else f"model.name={config.model.name}: the model has no weight that can be trained"
        )


def match(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], config: Config
) -> dict[str, str]:
    """Return the stored name of each tensor of the model that starts from one, by its own name.

    Raises:
        ConfigError: a parameter is not stored or has another shape, and `model.init_random` does
            not name it; or a pattern fits nothing.
    """
    renamed = rename(shapes, config.model.init_rename)
    persistent = set(model.state_dict(keep_vars=True))
    optional = split(config.model.init_random)
    found: dict[str, str] = {}
    missing: list[str] = []
    fitted: set[str] = set()
    tensors = [
        ([*names, *(name.replace(ADAPTED, "") for name in names if ADAPTED in name)], tensor)
        for names, tensor in tensors_of(model)
        if persistent & {*names}
    ]
    own = {name for names, _ in tensors for name in names}
    if own.isdisjoint(renamed):
        renamed = _with_other_prefix(renamed, own)
    for names, tensor in tensors:
        chosen = [one for one in optional for name in names if fnmatch.fnmatch(name, one)]
        fitted.update(chosen)
        name = next((name for name in names if name in renamed), None)
        if name is not None and shapes[renamed[name]] == tuple(tensor.shape):
            found.update(dict.fromkeys(names, renamed[name]))
        elif not chosen and isinstance(tensor, nn.Parameter) and ADAPTER not in names[0]:
            stored_shape = "" if name is None else f"{list(shapes[renamed[name]])} instead of "
            missing.append(f"{names[0]} ({stored_shape}{list(tensor.shape)})")
    for pattern in optional:
        if pattern not in fitted:
            raise ConfigError(_fits_nothing("model.init_random", pattern, own))
    if missing:
        raise ConfigError(_incomplete(config, missing, len(found), shapes, set(found.values())))
    return found


def rename(names: Iterable[str], rules: str | None) -> dict[str, str]:
    """Return the stored names by the names that `old=new` rules give them; the first rule counts.

    Raises:
        ConfigError: a rule has no `=`, differs in its stars, or fits no name.
    """
    names = list(names)
    found: dict[str, str] = {}
    used: set[str] = set()
    for name in names:
        new = name
        for rule in split(rules):
            old, equals, target = rule.partition("=")
            if not equals or old.count("*") != target.count("*") or old.count("*") > 1:
                raise ConfigError(
                    f"model.init_rename: expected rules old=new with at most one * on each side, "
                    f"such as backbone.*=encoder.*, got '{rule}'"
                )
            before, star, after = old.partition("*")
            if fnmatch.fnmatchcase(name, old) and (star or name == old):
                middle = name[len(before) : len(name) - len(after)]
                new = target.replace("*", middle)
                used.add(rule)
                break
        found[new] = name
    for rule in split(rules):
        if rule not in used:
            raise ConfigError(_fits_nothing("model.init_rename", rule.partition("=")[0], names))
    return found


def describe(model: nn.Module, source: Stored, names: Mapping[str, str]) -> str:
    """Say how much of the model starts from the stored tensors, and what does not."""
    tensors = list(tensors_of(model))
    persistent = set(model.state_dict(keep_vars=True))
    loaded = [tensor for places, tensor in tensors if places[0] in names]
    others = [
        places[0] for places, _ in tensors if places[0] not in names and {*places} & persistent
    ]
    unused = [name for name in source.shapes if name not in names.values()]
    text = f"{len(loaded)} tensors ({size(sum(one.nbytes for one in loaded))}) from {source.where}"
    text += f"; {len(others)} keep random or default values: {listed(others)}" if others else ""
    return text + (f"; {len(unused)} stored ones are not used: {listed(unused)}" if unused else "")


def split(text: str | None) -> list[str]:
    """Return the parts of a comma-separated text."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _with_other_prefix(renamed: dict[str, str], names: set[str]) -> dict[str, str]:
    """Add or remove one prefix of all names, if the model then has them."""

    def fits(changed: dict[str, str]) -> int:
        return len(changed.keys() & names)

    removed = {name.partition(".")[0] for name in renamed}
    added = {name.partition(".")[0] for name in names}
    options = [renamed]
    options += [
        {name.removeprefix(f"{one}."): old for name, old in renamed.items() if name != one}
        for one in removed
    ]
    options += [{f"{one}.{name}": old for name, old in renamed.items()} for one in added]
    return max(options, key=fits)


def _incomplete(
    config: Config, missing: list[str], found: int, shapes: Mapping[str, Any], used: set[str]
) -> str:
    unused = [name for name in shapes if name not in used]
    patterns = ",".join(dict.fromkeys(name.split(" ")[0] for name in missing[:SHOWN]))
    text = (
        f"model.init={config.model.init} holds {found} of {found + len(missing)} tensors of the "
        f"model; it does not hold {listed(missing)}. "
    )
    if unused:
        text += f"It also holds {listed(unused)}; if they belong together, set model.init_rename, "
        text += "such as old.*=new.*. "
    return text + f"To start them from random numbers, set model.init_random={patterns}"


def _fits_nothing(key: str, pattern: str, names: Iterable[str]) -> str:
    return f"{key}: no tensor has a name like '{pattern}'; there are {listed(list(names))}"


def _fill_attributes(model: nn.Module, recorder: deferred.Recorder) -> None:
    """Give other tensors their values: of plain objects, and of modules that are not registered."""

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        values, is_weight = recorder.values(tensor), isinstance(tensor, nn.Parameter)
        return nn.Parameter(values, tensor.requires_grad) if is_weight else values

    for holder, name, leaves in _attributes(model):
        if any(isinstance(one, torch.Tensor) and one.device.type == "meta" for one in leaves):
            vars(holder)[name] = tree_map_only(torch.Tensor, filled, vars(holder)[name])


def _check_attributes(model: nn.Module, model_name: str) -> None:
    """Raise ConfigError if a list holds a weight, since weights are replaced when they are spread.

    A class with its own `__setattr__`, such as LSTM, is taken to know.
    """
    names = {id(weight): name for name, weight in model.named_parameters()}
    plain: tuple[Any, ...] = object.__setattr__, nn.Module.__setattr__
    for holder, attribute, leaves in _attributes(model):
        held = next((names[id(one)] for one in leaves if id(one) in names), None)
        if held is not None and type(holder).__setattr__ in plain:
            raise ConfigError(
                f"model.name={model_name}: the weight {held} is also in "
                f"{type(holder).__name__}.{attribute}, which would keep the old tensor when the "
                "weights are spread over the ranks: use nn.ParameterList, take it from its "
                "module in forward(), or make its holder, such as an optimizer, outside the model"
            )


def _attributes(model: nn.Module) -> Iterator[tuple[Any, str, list[Any]]]:
    """Yield what modules and the objects in them hold beside their weights and buffers."""
    holders: list[Any] = [*model.modules()]
    registered = {id(holder) for holder in holders}
    seen, known = {*registered}, {"_parameters", "_buffers", "_modules"}
    for holder in holders:  # it grows
        for name in vars(holder).keys() - (known if id(holder) in registered else set()):
            leaves = tree_leaves(vars(holder)[name])
            yield holder, name, leaves
            found = [one for one in leaves if hasattr(one, "__dict__") and id(one) not in seen]
            holders += [one for one in found if not isinstance(one, NO_HOLDERS)]
            seen.update(map(id, found))
