"""The arguments of code that a configuration names, checked against its signature. No torch.

`x.name=package.module:attribute` names a function or class, `x.args.…` its arguments. rollcall
passes some parameters itself, by their names; all others are arguments. Before the run the
signature is read from the source without importing it, so that a login node can check it.
"""

import ast
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial, update_wrapper
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from rollcall.config import catalog, checks, plugin, trust
from rollcall.config.refusals import about_value, expected
from rollcall.config.schema import ConfigError, is_number
from rollcall.messages.text import did_you_mean
from rollcall.records.run_dir import named
from rollcall.system.files import closest, is_there, matches

Find = Callable[[str], "Code | None"]
DEEPEST = 8
"""Imports that are followed to find the source of a name."""


class Slot(NamedTuple):
    """A key that names code, and what that code receives."""

    known: Mapping[str, str]  # short names
    given: tuple[str, ...]  # the parameters that rollcall passes
    by_position: int = 0  # how many of them also fill required parameters of any name, in order
    is_called_later: bool = False  # the code is made from its arguments alone, and called later
    base: str = ""  # a class must derive from it; functions need not


SLOTS = {
    "model.name": Slot(catalog.MODELS, ("config", "source"), base="torch.nn:Module"),
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
        base="torch.optim:Optimizer",
    ),
    "optim.schedule": Slot(catalog.SCHEDULES, ("step", "steps", "config"), 2, True),
}
"""The keys that name code. Those with several entries have one for each name."""


class Code(NamedTuple):
    """A function or class: its signature, without `self`, and its docstring."""

    signature: inspect.Signature
    is_class: bool
    text: str
    is_object: bool = False  # neither a class nor a function


UNKNOWN = object()
"""A default that only the code knows."""
PLAIN_TYPES: Mapping[str, Any] = {
    kind.__name__: kind for kind in (int, float, str, bool, list, dict, tuple)
}
"""The types that are checked; a value of any other type is left to the code."""


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


def code_of(loaded: Any) -> Code | None:
    """Return the signature of a function, a class or another callable object."""
    is_class = inspect.isclass(loaded)
    # The call of a torch module hides the parameters of its forward method.
    called = loaded if is_class else getattr(loaded, "forward", loaded)
    try:
        signature = inspect.signature(called)
    except (ValueError, TypeError):
        return None
    is_object = not is_class and not inspect.isroutine(loaded)
    return Code(signature, is_class, inspect.getdoc(loaded) or "", is_object)


def cannot_take(code: Code, count: int) -> str:
    """Return the reason why code does not accept this number of arguments; empty if it does."""
    try:
        code.signature.bind(*range(count))
    except TypeError as error:
        return str(error)
    return ""


def checked(key: str, args_key: str, name: str, args: Mapping[str, Any], find: Find) -> Any:
    """Return the arguments with the defaults of the code; values are plain, as in YAML.

    `key` is one of SLOTS, and `name` the code's short or full name; `find` returns the signature of
    a full name if it is known. ConfigError: the name is unknown, or an argument does not exist, is
    missing or of a wrong type.
    """
    slot = SLOTS[key]
    code_name = _full_name(key, name)
    code = find(code_name) if code_name else None
    if code is None:
        return dict(args)
    parameters = {parameter.name: parameter for parameter in _settable(slot, name, code)}
    kinds = {parameter.kind for parameter in code.signature.parameters.values()}
    is_open = inspect.Parameter.VAR_KEYWORD in kinds
    for arg in args:
        if arg not in parameters and not is_open:
            raise ConfigError(_no_argument(slot, args_key, name, arg, parameters))
    values: dict[str, Any] = {}  # in the order of the signature
    for arg, parameter in parameters.items():
        if arg in args:
            _converted(f"{args_key}.{arg}", parameter, args[arg])
            values[arg] = args[arg]
        elif parameter.default is parameter.empty:
            if code.is_object and not slot.is_called_later:
                raise ConfigError(f"{key}={name}: expected a class or a function, got an object")
            about = re.search(rf"^ *{arg}: (.+?)\.?$", code.text, re.MULTILINE)
            raise ConfigError(
                f"{args_key}.{arg}: {name} needs this argument{f' ({about[1]})' if about else ''}; "
                "set it, or give the parameter a default. rollcall passes "
                f"{', '.join(slot.given)} by these names"
            )
        elif _is_plain(parameter.default):
            values[arg] = _plain(parameter.default)
    return values | dict(args)


def call(key: str, args_key: str, name: str, args: Mapping[str, Any], **given: Any) -> Any:
    """Import and call the code, or prepare it for later calls; raise ConfigError if it fails."""
    slot = SLOTS[key]
    loaded = plugin.load_attribute(_full_name(key, name), key)
    if not callable(loaded):
        raise ConfigError(f"{key}={name}: expected a class or a function, got {loaded!r:.80}")
    code = code_of(loaded)
    if slot.base and inspect.isclass(loaded):  # before it is called: a class may do anything
        base = plugin.load_attribute(slot.base, key)
        if not issubclass(loaded, base):
            wanted = f"a class derived from torch's {base.__name__}, or a function"
            raise ConfigError(f"{key}={name}: expected {wanted}, got the class {loaded.__name__}")
    values = checked(key, args_key, name, args, lambda _: code)
    if code is None:
        return loaded(*given.values(), **values)
    parameters = code.signature.parameters
    for arg, value in values.items():
        if arg in parameters:
            values[arg] = _converted(f"{args_key}.{arg}", parameters[arg], value)
    if slot.is_called_later:
        if code.is_class:
            return loaded(**values)
        return update_wrapper(partial(loaded, **values), loaded) if values else loaded
    passed = {name: given[source] for name, source in _taken(slot, code).items() if source in given}
    try:
        bound = code.signature.bind_partial(**passed, **values)
    except TypeError:  # positional-only parameters
        return loaded(*passed.values(), **values)
    return loaded(*bound.args, **bound.kwargs)


def complete(config: Any, find: Find = read) -> Any:
    """Return the configuration with checked arguments, and the defaults of those not given."""
    sections: dict[str, Any] = {}
    for key in SLOTS:
        section, _, field = key.partition(".")
        group = sections.get(section, getattr(config, section))
        named, args = getattr(group, field), "args" if field == "name" else f"{field}_args"
        if isinstance(named, Mapping):  # several entries
            entries = {}
            for name, entry in named.items():
                values = checked(key, f"{key}.{name}.args", entry.name, entry.args, find)
                entries[name] = entry.model_copy(update={"args": values})
            sections[section] = group.model_copy(update={field: entries})
        elif hasattr(group, args):
            values = checked(key, f"{section}.{args}", named, getattr(group, args), find)
            sections[section] = group.model_copy(update={args: values})
    return config.model_copy(update=sections)


def named_code(config: Any) -> list[tuple[str, str]]:
    """Return the key and the text of every `package.module:attribute` that names code."""
    names = [
        (f"optim.groups.{pattern}.optimizer", options.get("optimizer"))
        for pattern, options in config.optim.groups.items()
    ]
    for key in SLOTS:
        section, _, field = key.partition(".")
        value = getattr(getattr(config, section), field)
        entries = value.items() if isinstance(value, Mapping) else ()
        names += [(key, value), *((f"{key}.{entry}.name", code.name) for entry, code in entries)]
    return [(key, name) for key, name in names if isinstance(name, str) and ":" in name]


def check_modules(config: Any) -> None:
    """Raise ConfigError if a module that a configuration names does not exist; import nothing."""
    for key, name in named_code(config):
        module, _, attribute = name.partition(":")
        if module.endswith(".py") or "/" in module:
            meant = module.removesuffix(".py").strip("./").replace("/", ".")
            raise ConfigError(f"{key}={name}: expected a module, not a file: {meant}:{attribute}")
        top = module.partition(".")[0]
        if not (importlib.util.find_spec(top) or PathFinder.find_spec(top, [""])):
            raise ConfigError(plugin.missing(f"{key}={name}", top))


def check_surroundings(config: Any) -> None:
    """Raise ConfigError if the data or a logger is missing, or a file is where runs go."""
    root = Path(config.run.root).absolute()
    existing = closest(root)
    if not existing.is_dir():
        raise ConfigError(f"run.root: {existing} is a file; choose a folder")
    if existing != root and not os.access(existing, os.W_OK):
        raise ConfigError(f"run.root: you may not write to {existing}; choose another folder")
    for _, problem in absent(config):
        raise ConfigError(problem)
    check_packages(config)


def check_packages(config: Any) -> None:
    """Raise ConfigError without a tokenizer that the data need, or the package of a logger."""
    if config.data.name == "jsonl":
        check_tokenizer(config.data.args.get("tokenizer"))
    for entry in config.log.to.values():
        if entry.name in SLOTS["log.to"].known and not importlib.util.find_spec(entry.name):
            raise ConfigError(plugin.needs(f"log.to={entry.name}", entry.name))


def absent(config: Any) -> Iterator[tuple[Path, str]]:
    """Yield each path of data and weights that is not there, and a sentence about it."""
    data, init, run = config.data, config.model.init, config.run
    wanted = checks.DATA_PATHS.get(data.name, "the path of your data")
    part, text = checks.DATA_PARTS.get(data.name), data.path or ""
    paths = [text] if part else map(str.strip, text.split(","))
    for path in filter(None, [] if ":" in data.name else paths):
        if not matches(path):
            how = "write the whole path: shells do not replace ~ here"
            meant = how if path.startswith("~") else f"expected {wanted}"
            yield Path(path), f"data.path: {Path(path).absolute()} does not exist; {meant}"
        elif part and not any(Path(path).glob(part)):
            yield Path(path), f"data.path={path}: expected {wanted}"
    weights = Path(os.path.expanduser(init or ""))  # noqa: PTH111  # Path raises for unknown users
    has_begun = run.name and is_there(Path(run.root, run.name, "config.yaml"))
    if init and not (has_begun or is_there(weights) or named(init, "checkpoints")):
        missing = "no such file, folder or run"
        yield weights, f"model.init={init}: {missing}; expected {checks.WEIGHTS}"


def check_tokenizer(folder: str | None) -> None:
    """Raise ConfigError if the data set jsonl has no folder of a tokenizer."""
    if not folder:
        raise ConfigError(
            "data.name=jsonl needs data.args.tokenizer, the folder of a tokenizer, because neither "
            "model.init nor model.args.base is a folder with one"
        )


def describe(name: str) -> str:
    """Return the arguments of `package.module:attribute`, for `--help`."""
    code = read(name) or inspected(name)
    if code is None:
        return f"{name}: Python does not know its signature"
    passed = {given for slot in SLOTS.values() for given in slot.given}
    lines = [name, *(f"    {line}" for line in code.text.partition("\n\n")[0].splitlines())]
    for name, parameter in code.signature.parameters.items():
        hint, default = parameter.annotation, parameter.default
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kind = "" if hint is parameter.empty else inspect.formatannotation(hint)
        if name.lstrip("_") in passed and default is parameter.empty:
            about = "passed by rollcall"
        elif default is parameter.empty:
            about = "required"
        else:
            about = f"default: {'set in the code' if default is UNKNOWN else repr(default)}"
        lines.append(f"  {name}  ({'; '.join(filter(None, [kind.strip(chr(39)), about]))})")
    return "\n".join(lines)


def _full_name(key: str, name: str) -> str:
    """Return the code of a short name, empty for a model of torchvision; refuse an unknown one."""
    known = SLOTS[key].known
    if ":" in name or name in known:
        return known.get(name, name)
    if "." in name.strip("."):
        module, _, last = name.removeprefix("./").replace("/", ".").rpartition(".")
        if name.startswith(("nn.", "F.", "torch.nn.")) and (hint := did_you_mean(last, known)):
            raise ConfigError(f"{key}: unknown '{name}'{hint}")
        meant = f"{module}:{'NAME' if last == 'py' else last}"
        raise ConfigError(f"{key}: unknown '{name}'; write package.module:attribute, here {meant}")
    if key == "model.name":  # torchvision's are checked where torchvision is imported
        return ""
    if key == "optim.name":
        classes = {optimizer.lower(): optimizer for optimizer in _torch_optimizers()}
        if name.lower() in classes:
            return f"torch.optim:{classes[name.lower()]}"
        known = {**known, **dict.fromkeys(_torch_optimizers(), "")}
    if answer := about_value(key, name):
        raise ConfigError(f"{key}: unknown '{name}'; {answer}")
    classes_too = ["a class of torch.optim such as Muon"] if key == "optim.name" else []
    raise plugin.unknown(key, name, [*SLOTS[key].known, *classes_too], known)


@cache
def _torch_optimizers() -> tuple[str, ...]:
    path = _file("torch.optim")
    names = {alias.name for node in _tree(path).body for alias in _aliases(node)} if path else set()
    return tuple(sorted(name for name in names if name[:1].isupper() and name != "Optimizer"))


def _settable(slot: Slot, name: str, code: Code) -> Iterator[inspect.Parameter]:
    """Yield the parameters that a configuration may set; rollcall passes the others."""
    taken = _taken(slot, code)
    if slot.given[0] == "params" and name != "sgd":  # optim.momentum is for sgd alone
        taken.pop("momentum", None)
    for parameter in code.signature.parameters.values():
        is_open = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.name not in taken and not is_open:
            yield parameter


def _taken(slot: Slot, code: Code) -> dict[str, str]:
    """Return the argument of rollcall that each parameter receives."""
    if slot.is_called_later and code.is_class:
        return {}
    names = [*code.signature.parameters]
    taken = {name: name.lstrip("_") for name in names if name.lstrip("_") in slot.given}
    for index, name in enumerate(names[: len(slot.given)]):
        is_required = code.signature.parameters[name].default is inspect.Parameter.empty
        is_filled = index < slot.by_position and is_required
        if name not in taken and (is_filled or not name.strip("_")):
            taken[name] = slot.given[index]
    return taken


def _no_argument(slot: Slot, key: str, name: str, arg: str, known: Iterable[str]) -> str:
    if arg in slot.given and (arg != "momentum" or name == "sgd"):
        return f"{key}.{arg}: rollcall passes '{arg}' to {name} itself; remove the key"
    takes = f"; it takes {', '.join(known) or 'none'}"
    hint = did_you_mean(arg, known, prefix=f"{key}.")
    return f"{key}.{arg}: {name} has no argument '{arg}'{hint or takes}"


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
            return _kind(ast.parse(hint, mode="eval").body)
        except (SyntaxError, ValueError, TypeError):
            return Any
    return hint


def _kind(hint: ast.expr) -> Any:
    """Return the type that an annotation means, without running it; Any if unsure."""
    match hint:
        case ast.Constant(value=value) if value in (None, ...):
            return value
        case ast.Constant(value=str(text)):
            return _kind(ast.parse(text, mode="eval").body)
        case ast.Name(id=name):
            return PLAIN_TYPES.get(name, Any)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _kind(left) | _kind(right)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            return Literal.__getitem__(ast.literal_eval(choices))
        case ast.Subscript(value=ast.Name(id="list" | "dict" | "tuple" as name), slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return PLAIN_TYPES[name][tuple(map(_kind, parts))]
    return Any


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


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
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            signature = _signature(member)
            parameters = list(signature.parameters.values())[1:]
            return Code(signature.replace(parameters=parameters), True, text)
    if node.decorator_list or node.keywords or len(node.bases) > 1:
        return None
    if not node.bases:
        return Code(inspect.Signature(), True, text)
    base = node.bases[0]
    code = _read(module, base.id, depth - 1) if isinstance(base, ast.Name) else None
    return code._replace(text=text) if code else None


def _signature(node: ast.FunctionDef) -> inspect.Signature:
    """Return the signature of a function, with the defaults that are literals."""
    args, of = node.args, inspect.Parameter
    positional = [*args.posonlyargs, *args.args]
    given: dict[ast.arg, ast.expr | None] = {}
    given |= zip(positional[::-1], args.defaults[::-1], strict=False)
    given |= zip(args.kwonlyargs, args.kw_defaults, strict=True)
    groups = (
        (of.POSITIONAL_ONLY, args.posonlyargs),
        (of.POSITIONAL_OR_KEYWORD, args.args),
        (of.VAR_POSITIONAL, [args.vararg]),
        (of.KEYWORD_ONLY, args.kwonlyargs),
        (of.VAR_KEYWORD, [args.kwarg]),
    )
    parameters = ((kind, arg) for kind, group in groups for arg in group if arg)
    return inspect.Signature([_parameter(arg, kind, given.get(arg)) for kind, arg in parameters])


def _parameter(arg: ast.arg, kind: Any, default: ast.expr | None) -> inspect.Parameter:
    value: Any = inspect.Parameter.empty
    if default is not None:
        try:
            value = ast.literal_eval(default)
        except (ValueError, TypeError):
            value = UNKNOWN
    hint = ast.unparse(arg.annotation) if arg.annotation else inspect.Parameter.empty
    return inspect.Parameter(arg.arg, kind, default=value, annotation=hint)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), path.name)


def _aliases(node: ast.stmt) -> list[ast.alias]:
    return node.names if isinstance(node, ast.ImportFrom) else []


def _imported(module: str, path: Path, node: ast.ImportFrom) -> str:
    """Return the module of a `from … import`, which may be relative."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    name = "." * node.level + (node.module or "")
    return importlib.util.resolve_name(name, package) if node.level else name


def _file(module: str) -> Path | None:
    """Return the source of a module, without importing a package above it."""
    origin = trust.origin(module)
    return Path(origin) if origin and origin.endswith(".py") else None
