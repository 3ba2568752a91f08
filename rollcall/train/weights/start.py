"""The tensors of a new run, on the meta device until the model is spread over the ranks."""

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from rollcall.config import Config, ConfigError
from rollcall.messages.text import listed, size
from rollcall.train.checkpoint.layout import published
from rollcall.train.checkpoint.tools import export
from rollcall.train.numerics.randomness import kept
from rollcall.train.ranks.device import local_of
from rollcall.train.ranks.run import Run
from rollcall.train.ranks.world import World
from rollcall.train.torch_private import REGISTRIES, put, storage_key, tree_leaves, tree_map_only
from rollcall.train.weights import deferred, stored
from rollcall.train.weights.deferred import tensors_of

ADAPTED, ADAPTER = ".base_layer", ".lora_"
"""Parts of the names of weights in a model of peft."""
MAX_PATTERNS = 6
"""Names of tensors that a message suggests as patterns."""
STAND_IN = 0.02
"""The largest number in place of a weight that a checkpoint will fill."""
NO_HOLDERS = torch.Tensor, type, ModuleType  # their attributes do not belong to the model


class Start:
    """A model, and the initial values of its tensors."""

    def __init__(self, model: nn.Module, recorder: deferred.Recorder | None) -> None:
        """Take a model that `deferred.build` has made; without a recorder it has all values."""
        self.model = model
        self.resumes = False  # whether a checkpoint will fill all that checkpoints hold
        self._held = set(model.state_dict(keep_vars=True))
        self.reason = ""  # why the model could not be built without its values
        self.report = ""  # the tensors that start from stored ones, in words
        self._recorder = recorder
        self._stored: stored.Stored | None = None
        self._names: dict[str, str] = {}  # stored names by names in the model
        self._recorded: dict[str, torch.Tensor] = {}
        if recorder is not None:
            self._recorded = {name: tensor for names, tensor in tensors_of(model) for name in names}
            with kept(deferred.CPU):
                _fill_attributes(model, recorder)
            self.release(model)

    def read_from(self, source: stored.Stored, names: Mapping[str, str]) -> None:
        """Let tensors start from stored ones; `names` maps names in the model to stored names."""
        self._stored, self._names = source, dict(names)
        if self._recorder is None:
            self._load({names[0]: tensor for names, tensor in tensors_of(self.model)})

    def fill(
        self, model: nn.Module, device: torch.device, buffers: torch.device, draws: bool = True
    ) -> None:
        """Give the weights and buffers of a spread model memory and the values of this rank's part.

        Weights go to `device`, buffers to the device `buffers`; they may be DTensors. Without
        `draws`, large weights that a checkpoint will fill get other numbers, which cost less.
        """
        wanted: dict[str, torch.Tensor] = {}
        later = set[str]()
        for names, tensor in list(tensors_of(model)):
            if tensor.device.type == "meta":
                is_large = isinstance(tensor, nn.Parameter) and tensor.numel() > deferred.SMALL
                is_large &= tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
                if not draws and names[0] in self._held and is_large:
                    later.add(names[0])  # code may rely on the values of any other tensor
                target = device if isinstance(tensor, nn.Parameter) else buffers
                full = torch.empty_like(tensor.detach(), device=target)
                replace(model, names, tensor, full)
                wanted[names[0]] = full
        loaded = self._load(wanted)
        assert self._recorder is not None or not wanted, "only a deferred model has no values"
        with kept(device):
            for name, tensor in wanted.items():
                if name in later - loaded:
                    local_of(tensor).uniform_(-STAND_IN, STAND_IN)
                elif name not in loaded and self._recorder is not None:
                    stored.copy_parts(self._recorder.values(self._recorded[name]), tensor)

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
                model.cpu()  # as the parts of a strategy expect it
            else:
                self.release(model)

    def _load(self, wanted: Mapping[str, torch.Tensor]) -> set[str]:
        loaded = {name for name in wanted if name in self._names}
        if self._stored is not None and loaded:
            targets = [(self._names[name], wanted[name].detach()) for name in loaded]
            by_stored_name = dict(targets)
            with torch.no_grad():
                self._stored.fill(by_stored_name)
                for name, target in targets:  # several tensors may start from one stored tensor
                    if target is not by_stored_name[name]:
                        target.copy_(by_stored_name[name])
        return loaded


def replace(
    model: nn.Module, names: Iterable[str], old: torch.Tensor, values: torch.Tensor
) -> None:
    """Replace a tensor under all its names; a parameter stays one, with the same attributes."""
    new: Any = values
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(values, requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)
    for name in names:
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        put(module, leaf, new)


def built(config: Config, make: Callable[[], nn.Module]) -> Start:
    """Build a model and freeze parts of it; ConfigError if a weight cannot be initialized."""
    model, recorder, reason = deferred.build(make, config.seed)
    for names, tensor in tensors_of(model) if recorder is None else ():
        if tensor.is_meta:
            raise ConfigError(
                f"model.name={config.model.name}: {names[0]} is on the meta device, and nothing "
                "sets its values; build the model on the CPU: a rank gets only its own part anyway"
            )
    freeze(model, config)
    _check_attributes(model, config.model.name)
    begin = Start(model, recorder)
    begin.reason = reason
    return begin


def start(run: Run, make: Callable[[], nn.Module]) -> Start:
    """Build a run's model and find its initial values on all ranks; or raise ConfigError."""
    config, world = run.config, run.world
    begin = built(config, make)
    if begin.reason:
        run.say(f"rollcall: every rank builds the whole model first: {begin.reason}")
    resumes = world.broadcast(world.is_main and bool(published(run.run_dir.checkpoints)))
    begin.resumes = resumes and config.checkpoint.save_frozen
    if config.model.init is not None and not begin.resumes:
        read_init(begin, config, world)
        run.say(f"rollcall: model.init={config.model.init}: {begin.report}")
    return begin


def read_init(begin: Start, config: Config, world: World) -> None:
    """Let a model start from `model.init`; raise ConfigError on all ranks if that does not fit."""
    with world.together():
        if check := getattr(begin.model, "check_stored", None):
            check(Path(str(config.model.init)).expanduser())
        source = stored.open_(str(config.model.init))
        names = match(begin.model, source.shapes, config)
        begin.report = describe(begin.model, source, names)
        begin.read_from(source, names)


def freeze(model: nn.Module, config: Config) -> None:
    """Exclude parameters from training; ConfigError if a pattern fits none, or all are excluded."""
    parameters = dict(model.named_parameters())
    for pattern in split(config.model.freeze):
        if not (names := fnmatch.filter(parameters, pattern)):
            raise ConfigError(_fits_nothing("model.freeze", pattern, parameters))
        for name in names:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            f"model.freeze={config.model.freeze} freezes the whole model, so nothing can be trained"
            if config.model.freeze is not None
            else f"model.name={config.model.name}: the model has no weight that can be trained"
        )


def match(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], config: Config
) -> dict[str, str]:
    """Return the stored names of tensors that `model.init` holds, by their names in the model.

    Raise ConfigError if a parameter that `model.init_random` does not name is not stored or has
    another shape, or if a pattern fits nothing.
    """
    renamed = rename(shapes, config.model.init_rename)
    persistent = set(model.state_dict(keep_vars=True))
    optional = split(config.model.init_random)
    matches: dict[str, str] = {}
    missing: list[str] = []
    used_patterns: set[str] = set()
    rules = getattr(model, "stored_names", {})  # for the names of Hugging Face
    tensors = []
    for names, tensor in tensors_of(model):
        if persistent & {*names}:
            adapted = [name.replace(ADAPTED, "") for name in names if ADAPTED in name]
            theirs = [export.renamed(name, rules) for name in names if rules]
            tensors.append(([*names, *adapted, *theirs], tensor))
    model_names = {name for names, _ in tensors for name in names}
    if model_names.isdisjoint(renamed):
        renamed = _with_other_prefix(renamed, model_names)
    for names, tensor in tensors:
        patterns = [pattern for pattern in optional if fnmatch.filter(names, pattern)]
        used_patterns.update(patterns)
        name = next((name for name in names if name in renamed), None)
        if name is not None and shapes[renamed[name]] == tuple(tensor.shape):
            matches.update(dict.fromkeys(names, renamed[name]))
        elif not patterns and isinstance(tensor, nn.Parameter) and ADAPTER not in names[0]:
            stored_shape = "" if name is None else f"{list(shapes[renamed[name]])} instead of "
            missing.append(f"{names[0]} ({stored_shape}{list(tensor.shape)})")
    for pattern in optional:
        if pattern not in used_patterns:
            raise ConfigError(_fits_nothing("model.init_random", pattern, model_names))
    if missing:
        raise ConfigError(_incomplete(config, missing, len(matches), shapes, {*matches.values()}))
    return matches


def rename(names: Iterable[str], rules: str | None) -> dict[str, str]:
    """Return stored names by the names that `old=new` rules give them; the first rule applies."""
    names = list(names)
    renamed: dict[str, str] = {}
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
                new = target.replace("*", name[len(before) : len(name) - len(after)])
                used.add(rule)
                break
        renamed[new] = name
    for rule in split(rules):
        if rule not in used:
            raise ConfigError(_fits_nothing("model.init_rename", rule.partition("=")[0], names))
    return renamed


def describe(model: nn.Module, source: stored.Stored, names: Mapping[str, str]) -> str:
    """Describe the tensors of the model that start from stored ones, and the others."""
    tensors = {aliases[0]: (aliases, tensor.nbytes) for aliases, tensor in tensors_of(model)}
    persistent = set(model.state_dict(keep_vars=True))
    loaded = [nbytes for name, (_, nbytes) in tensors.items() if name in names]
    rest = {name: aliases for name, (aliases, _) in tensors.items() if name not in names}
    others = [name for name, aliases in rest.items() if {*aliases} & persistent]
    unused = [name for name in source.shapes if name not in names.values()]
    text = f"{len(loaded)} tensors ({size(sum(loaded))}) from {source.where}"
    if others:
        text += f"; {len(others)} keep random or default values: {listed(others)}"
    if unused:
        text += f"; {len(unused)} stored ones are not used: {listed(unused)}"
    return text


def split(text: str | None) -> list[str]:
    """Return the parts of a comma-separated text."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _with_other_prefix(renamed: dict[str, str], names: set[str]) -> dict[str, str]:
    """Add or remove the prefix of all names with which most of them are names of the model."""
    theirs, ours = ({name.partition(".")[0] for name in some} for some in (renamed, names))
    options = [renamed]
    for prefix in theirs:
        rest = (item for item in renamed.items() if item[0] != prefix)
        options.append({name.removeprefix(f"{prefix}."): old for name, old in rest})
    options += [{f"{prefix}.{name}": old for name, old in renamed.items()} for prefix in ours]
    return max(options, key=lambda option: len(option.keys() & names))


def _incomplete(
    config: Config, missing: list[str], count: int, shapes: Mapping[str, Any], used: set[str]
) -> str:
    unused = [name for name in shapes if name not in used]
    patterns = ",".join(dict.fromkeys(name.split(" ")[0] for name in missing[:MAX_PATTERNS]))
    text = (
        f"model.init={config.model.init} holds {count} of {count + len(missing)} tensors of the "
        f"model; it does not hold {listed(missing)}. "
    )
    if unused:
        text += f"It also holds {listed(unused)}; if they belong together, set model.init_rename, "
        text += "such as old.*=new.*. "
    return text + f"To start them from random numbers, set model.init_random={patterns}"


def _fits_nothing(key: str, pattern: str, names: Iterable[str]) -> str:
    return f"{key}: no tensor has a name like '{pattern}'; there are {listed(list(names))}"


def _fill_attributes(model: nn.Module, recorder: deferred.Recorder) -> None:
    """Give tensors in plain objects and in modules that are not registered their values."""

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        values, is_weight = recorder.values(tensor), isinstance(tensor, nn.Parameter)
        return nn.Parameter(values, tensor.requires_grad) if is_weight else values

    for holder, name, leaves in _attributes(model):
        if any(isinstance(leaf, torch.Tensor) and leaf.device.type == "meta" for leaf in leaves):
            vars(holder)[name] = tree_map_only(torch.Tensor, filled, vars(holder)[name])


def _check_attributes(model: nn.Module, model_name: str) -> None:
    """Raise ConfigError if a list holds a weight, since weights are replaced when they are spread.

    The same for another tensor with the memory of a weight. Classes with their own `__setattr__`,
    such as LSTM, are trusted to keep such a list up to date.
    """
    names = {id(weight): name for name, weight in model.named_parameters()}
    tensors: list[tuple[str, Any]] = [*model.named_parameters(), *model.named_buffers()]
    trained = {_start(tensor): name for name, tensor in tensors if tensor.requires_grad}
    plain: tuple[Any, ...] = object.__setattr__, nn.Module.__setattr__
    for holder, attribute, leaves in _attributes(model):
        what = f"{type(holder).__name__}.{attribute}"
        computes = hasattr(holder, f"{attribute}_orig")  # torch's old norms do so in each pass
        if not computes and type(holder).__setattr__ in plain:
            tensors += [(what, leaf) for leaf in leaves if id(leaf) not in names]
        held = next((names[id(leaf)] for leaf in leaves if id(leaf) in names), None)
        if held is not None and type(holder).__setattr__ in plain:
            raise ConfigError(
                f"model.name={model_name}: the weight {held} is also in "
                f"{type(holder).__name__}.{attribute}, which would keep the old tensor when the "
                "weights are spread over the ranks: use nn.ParameterList, take it from its "
                "module in forward(), or make its holder, such as an optimizer, outside the model"
            )
    for name, tensor in tensors:
        weight = trained.get(_start(tensor)) if isinstance(tensor, torch.Tensor) else None
        if weight not in (None, name):
            raise ConfigError(
                f"model.name={model_name}: {name} has the memory of the weight {weight}, but not "
                "once the weights are on their devices: use the weight in forward(), or clone() it"
            )


def _start(tensor: torch.Tensor) -> object:
    """Return the same for tensors that begin in one place of memory."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return id(tensor)
    return storage_key(tensor), tensor.storage_offset()


def _attributes(model: nn.Module) -> Iterator[tuple[Any, str, list[Any]]]:
    """Yield the attributes of modules and of the objects in them, but not weights and buffers."""
    holders: list[Any] = [*model.modules()]
    registered = {id(holder) for holder in holders}
    seen, known = {*registered}, REGISTRIES
    for holder in holders:  # the list grows
        for name in vars(holder).keys() - (known if id(holder) in registered else set()):
            leaves = tree_leaves(vars(holder)[name])
            yield holder, name, leaves
            new = [leaf for leaf in leaves if hasattr(leaf, "__dict__") and id(leaf) not in seen]
            holders += [leaf for leaf in new if not isinstance(leaf, NO_HOLDERS)]
            seen.update(map(id, new))
