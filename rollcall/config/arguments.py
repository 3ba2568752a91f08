"""The arguments of code that a configuration names, checked against its signature. No torch.

`x.name=package.module:attribute` names a function or class, `x.args.…` its arguments. rollcall
passes some parameters itself, by their names; all others are arguments. Before the run the
signature is read from the source without importing it, so that a login node can check it.
"""

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial, update_wrapper
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from rollcall.config import catalog, plugin
from rollcall.config.refusals import expected
from rollcall.config.schema import ConfigError, is_number
from rollcall.config.synonyms import about_value
from rollcall.text import did_you_mean

Find = Callable[[str], "Code | None"]
DEEPEST = 8
"""Imports that are followed to find the source of a name."""


class Slot(NamedTuple):
    """A key that names code, and what that code receives."""

    known: Mapping[str, str]  # short names
    given: tuple[str, ...]  # the parameters that rollcall passes
    by_place: int = 0  # this many of them also fill required parameters of other names, in order
    is_called_later: bool = False  # a class is made of its arguments alone; its object is called


SLOTS = {
    "model.name": Slot(catalog.MODELS, ("config", "source")),
    "data.name": Slot(catalog.DATA_SETS, ("config", "world")),
    "data.collate": Slot({}, ("samples",), 1, True),
    "train.loss": Slot(catalog.LOSSES, ("outputs", "targets", "model", "batch"), 2, True),
    "train.metrics": Slot({}, ("outputs", "targets"), 2, True),
    "train.callbacks": Slot({}, ("run", "model")),
    "log.to": Slot(catalog.LOGGERS, ("run", "model")),
    "optim.name": Slot(
        catalog.OPTIMIZERS,
        ("params", "lr", "weight_decay", "momentum", "fused", "foreach", "config"),
        1,
    ),
    "optim.schedule": Slot(catalog.SCHEDULES, ("step", "steps", "config"), 2, True),
}
"""The keys that name code. Those with several entries have one for each name."""


class Code(NamedTuple):
    """A function or class: its signature, without `self`, and its docstring."""

    signature: inspect.Signature
    is_class: bool
    text: str


class _Unknown:
    """A default that only the code knows."""

    def __repr__(self) -> str:
        return "set in the code"


UNKNOWN = _Unknown()


def read(name: str) -> Code | None:
    """Read `package.module:attribute` from its source; None if that does not show its signature."""
    try:
        module, _, attribute = name.partition(":")
        return _read(module, attribute, DEEPEST)
    except (OSError, SyntaxError, ValueError, TypeError):
        return None


def inspected(name: str) -> Code | None:
    """Import `package.module:attribute`; None if Python does not know its signature."""
    return code_of(plugin.load_attribute(name, ""))


def code_of(found: Any) -> Code | None:
    """Return the signature of a function, class or object that can be called."""
    is_class = inspect.isclass(found)
    # The call of a torch module hides the parameters of its forward method.
    called = found if is_class else getattr(found, "forward", found)
    try:
        signature = inspect.signature(called)
    except (ValueError, TypeError):
        return None
    return Code(signature, is_class, inspect.getdoc(found) or "")


def cannot_take(code: Code, count: int) -> str:
    """Return why code cannot be called with this number of arguments; an empty text if it can."""
    try:
        code.signature.bind(*range(count))
    except TypeError as error:
        return str(error)
    return ""


def checked(key: str, args_key: str, name: str, args: Mapping[str, Any], find: Find) -> Any:
    """Return the arguments with the defaults of the code; values are plain, as in YAML.

    Raises:
        ConfigError: the name is unknown, an argument does not exist, is missing or of a wrong type.
    """
    slot = SLOTS[key]
    code_name = _full_name(key, name)
    code = find(code_name) if code_name else None
    if code is None:
        return dict(args)
    parameters = {one.name: one for one in _own(slot, name, code)}
    is_open = any(one.kind is one.VAR_KEYWORD for one in code.signature.parameters.values())
    for arg in args:
        if arg not in parameters and not is_open:
            raise ConfigError(_no_argument(slot, args_key, name, arg, parameters))
    values: dict[str, Any] = {}  # in the order of the signature
    for arg, parameter in parameters.items():
        if arg in args:
            _converted(f"{args_key}.{arg}", parameter, args[arg])
            values[arg] = args[arg]
        elif parameter.default is parameter.empty:
            raise ConfigError(
                f"{args_key}.{arg}: {name} needs this argument; set it, or give the parameter a "
                f"default. rollcall passes {', '.join(slot.given)} by these names"
            )
        elif _is_plain(parameter.default):
            values[arg] = _plain(parameter.default)
    return values | dict(args)


def call(key: str, args_key: str, name: str, args: Mapping[str, Any], **given: Any) -> Any:
    """Import the code and call it; a class or function that is called later is only prepared.

    Raises:
        ConfigError: the code cannot be imported, or the arguments do not fit.
    """
    slot = SLOTS[key]
    found = plugin.load_attribute(_full_name(key, name), key)
    code = code_of(found)
    values = checked(key, args_key, name, args, lambda _: code)
    if code is None:
        return found(*given.values(), **values)
    parameters = code.signature.parameters
    for arg, value in values.items():
        if arg in parameters:
            values[arg] = _converted(f"{args_key}.{arg}", parameters[arg], value)
    if slot.is_called_later:
        if code.is_class:
            return found(**values)
        return update_wrapper(partial(found, **values), found) if values else found
    passed = {name: given[source] for name, source in _taken(slot, code).items() if source in given}
    try:
        places = code.signature.bind_partial(**passed, **values)
    except TypeError:  # positional-only parameters
        return found(*passed.values(), **values)
    return found(*places.args, **places.kwargs)


def complete(config: Any, find: Find = read) -> Any:
    """Return the configuration with checked arguments, and the defaults of those not given."""
    sections: dict[str, Any] = {}
    for key in SLOTS:
        section, _, field = key.partition(".")
        group = sections.get(section, getattr(config, section))
        named, args = getattr(group, field), "args" if field == "name" else f"{field}_args"
        if isinstance(named, Mapping):  # several entries
            entries = {}
            for name, one in named.items():
                values = checked(key, f"{key}.{name}.args", one.name, one.args, find)
                entries[name] = one.model_copy(update={"args": values})
            sections[section] = group.model_copy(update={field: entries})
        elif hasattr(group, args):
            values = checked(key, f"{section}.{args}", named, getattr(group, args), find)
            sections[section] = group.model_copy(update={args: values})
    return config.model_copy(update=sections)


def check_modules(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if a module that a configuration names is nowhere; import nothing."""
    for key, value in plugin.named(values):
        entry = key.removesuffix(".name").rpartition(".")[0]
        if not {key, entry} & SLOTS.keys():  # a `:` in another value may mean something else
            continue
        top = value.partition(":")[0].partition(".")[0]
        if not (importlib.util.find_spec(top) or PathFinder.find_spec(top, [""])):
            raise ConfigError(plugin.missing(f"{key}={value}", top))


def describe(name: str) -> str:
    """Return the arguments of `package.module:attribute`, for `--help`."""
    code = read(name) or inspected(name)
    if code is None:
        return f"{name}: Python does not know its signature"
    passed = {given for slot in SLOTS.values() for given in slot.given}
    lines = [name, *(f"    {line}" for line in code.text.partition("\n\n")[0].splitlines())]
    for one in code.signature.parameters.values():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        kind = "" if one.annotation is one.empty else inspect.formatannotation(one.annotation)
        if one.name.lstrip("_") in passed and one.default is one.empty:
            about = "passed by rollcall"
        elif one.default is one.empty:
            about = "required"
        else:
            about = f"default: {one.default!r}"
        lines.append(f"  {one.name}  ({'; '.join(filter(None, [kind.strip(chr(39)), about]))})")
    return "\n".join(lines)


def _full_name(key: str, name: str) -> str:
    """Return the code of a short name; an empty text for a model of torchvision.

    Raises:
        ConfigError: the name is unknown.
    """
    known = SLOTS[key].known
    if ":" in name or name in known:
        return known.get(name, name)
    if key == "model.name":  # torchvision's are checked where torchvision is imported
        return ""
    if key == "optim.name":
        classes = {one.lower(): one for one in _torch_optimizers()}
        if name.lower() in classes:
            return f"torch.optim:{classes[name.lower()]}"
        known = {**known, **dict.fromkeys(_torch_optimizers(), "")}
    if answer := about_value(key, name):
        raise ConfigError(f"{key}: unknown '{name}'; {answer}")
    classes_too = ["a class of torch.optim such as Muon"] if key == "optim.name" else []
    raise plugin.unknown(key, name, [*SLOTS[key].known, *classes_too], known)


@cache
def _torch_optimizers() -> tuple[str, ...]:
    """Return the classes of torch.optim, without importing it."""
    path = _file("torch.optim")
    names = {alias.name for node in _tree(path).body for alias in _aliases(node)} if path else set()
    return tuple(sorted(one for one in names if one[:1].isupper() and one != "Optimizer"))


def _own(slot: Slot, name: str, code: Code) -> Iterator[inspect.Parameter]:
    """Yield the parameters that are arguments; rollcall passes the others."""
    taken = _taken(slot, code)
    if slot.given[0] == "params" and name != "sgd":  # optim.momentum is for sgd alone
        taken.pop("momentum", None)
    for one in code.signature.parameters.values():
        if one.name not in taken and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            yield one


def _taken(slot: Slot, code: Code) -> dict[str, str]:
    """Return what each parameter receives that rollcall passes."""
    if slot.is_called_later and code.is_class:
        return {}
    names = [*code.signature.parameters]
    found = {name: name.lstrip("_") for name in names if name.lstrip("_") in slot.given}
    for place, name in enumerate(names[: len(slot.given)]):
        is_required = code.signature.parameters[name].default is inspect.Parameter.empty
        is_placed = place < slot.by_place and is_required
        if name not in found and (is_placed or not name.strip("_")):
            found[name] = slot.given[place]
    return found


def _no_argument(
    slot: Slot, args_key: str, name: str, arg: str, parameters: Mapping[str, Any]
) -> str:
    if arg in slot.given:
        return f"{args_key}.{arg}: rollcall passes '{arg}' to {name} itself; remove the key"
    takes = f"; it takes {', '.join(parameters)}" if parameters else "; it takes none"
    hint = did_you_mean(arg, parameters, prefix=f"{args_key}.")
    return f"{args_key}.{arg}: {name} has no argument '{arg}'{hint or takes}"


def _converted(key: str, parameter: inspect.Parameter, value: Any) -> Any:
    """Return the value as the parameter's type; ConfigError if it does not fit."""
    kind = _type(parameter)
    try:
        adapter = _adapter(kind)
    except Exception:  # pydantic does not know the type
        return value
    if isinstance(value, bool) and is_number(kind):
        raise ConfigError(f"{key}: expected a number, got {value!r}")
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{key}: expected {expected(error.errors()[0])}, got {value!r}") from None


_adapter = cache(TypeAdapter)  # ranks inherit their parent's


def _type(parameter: inspect.Parameter) -> Any:
    hint, default = parameter.annotation, parameter.default
    if hint is parameter.empty:
        kinds = {bool: bool, int: int | float, float: int | float, str: str}
        return kinds.get(type(default), Any)
    if isinstance(hint, str):
        try:
            return eval(hint, {"__builtins__": {}}, _Names())
        except Exception:  # a name that only the module knows
            return Any
    return hint


class _Names(dict[str, Any]):
    """The types that an annotation may name; all others accept any value."""

    KNOWN: Mapping[str, Any] = {
        **{one.__name__: one for one in (int, float, str, bool, list, dict, tuple)},
        "None": None,
        "Literal": Literal,
    }

    def __missing__(self, name: str) -> Any:
        return self.KNOWN.get(name, Any)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    return value is None or type(value) in (bool, int, float, str)


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _read(module: str, attribute: str, depth: int) -> Code | None:
    path = _file(module)
    if path is None or not depth:
        return None
    for node in reversed(_tree(path).body):
        if isinstance(node, ast.FunctionDef) and node.name == attribute:
            text = ast.get_docstring(node) or ""
            return None if node.decorator_list else Code(_signature(node), False, text)
        if isinstance(node, ast.ClassDef) and node.name == attribute:
            return _read_class(module, node, depth)
        for alias in _aliases(node):
            if (alias.asname or alias.name) == attribute and isinstance(node, ast.ImportFrom):
                return _read(_imported(module, path, node), alias.name, depth - 1)
    return None


def _read_class(module: str, node: ast.ClassDef, depth: int) -> Code | None:
    text = ast.get_docstring(node) or ""
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            signature = _signature(one)
            parameters = list(signature.parameters.values())[1:]
            return Code(signature.replace(parameters=parameters), True, text)
    if node.decorator_list or node.keywords or len(node.bases) > 1:
        return None
    if not node.bases:
        return Code(inspect.Signature(), True, text)
    base = node.bases[0]
    found = _read(module, base.id, depth - 1) if isinstance(base, ast.Name) else None
    return found._replace(text=text) if found else None


def _signature(node: ast.FunctionDef) -> inspect.Signature:
    """Return the signature of a function, with the defaults that are literals."""
    arguments = node.args
    arguments.defaults = [_literal(one) for one in arguments.defaults]
    arguments.kw_defaults = [one and _literal(one) for one in arguments.kw_defaults]
    stub = f"from __future__ import annotations\ndef stub({ast.unparse(arguments)}): ..."
    names: dict[str, Any] = {"UNKNOWN": UNKNOWN}
    exec(stub, names)
    return inspect.signature(names["stub"])


def _literal(default: ast.expr) -> ast.expr:
    try:
        ast.literal_eval(default)
    except (ValueError, TypeError):
        return ast.Name("UNKNOWN", ast.Load())
    return default


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def _aliases(node: ast.stmt) -> list[ast.alias]:
    return node.names if isinstance(node, ast.ImportFrom) else []


def _imported(module: str, path: Path, node: ast.ImportFrom) -> str:
    """Return the module of a `from … import`, which may be relative."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    name = "." * node.level + (node.module or "")
    return importlib.util.resolve_name(name, package) if node.level else name


def _file(module: str) -> Path | None:
    """Return the source of a module, without importing a package above it."""
    places: list[str] | None = None
    spec: ModuleSpec | None = None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, places if places is not None else ["", *sys.path])
        if spec is None:
            return None
        places = [*(spec.submodule_search_locations or [])]
    origin = spec.origin if spec else None
    return Path(origin) if origin and origin.endswith(".py") else None
