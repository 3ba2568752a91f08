"""The data sets. Each is a file here and a line in `rollcall/config/catalog.yaml`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from rollcall.config import arguments
from rollcall.config.catalog import DATA_SETS
from rollcall.config.plugin import load_attribute
from rollcall.config.schema import ConfigError, Data
from rollcall.train.data.form import shape_of
from rollcall.train.data.reader import Reader, Selection
from rollcall.train.data.source import Batch, BatchDataset, InMemory, ReadFiles, Source
from rollcall.train.data.stream import PARTS, Stream, adapted
from rollcall.train.ranks.world import World
from rollcall.train.torch_private import keystr, tree_flatten_with_path


def load(config: Data, world: World, seed: int = 0) -> Source:
    """Load the data that the configuration names; every rank must call this together."""
    if config.augment and config.name in DATA_SETS and not _declared(config.name, "augments"):
        names = [name for name in DATA_SETS if _declared(name, "augments")]
        raise ConfigError(
            f"data.augment=true: data.name={config.name} has no augmentation; remove it, or choose "
            f"{', '.join(names)}"
        )
    given = {"config": config, "world": world}
    source = arguments.call("data.name", "data.args", config.name, config.args, **given)
    source = _source(source, config, seed)
    return replace(source, read=source.read or _reader(config, source.classes))


def _source(value: Any, config: Data, seed: int) -> Source:
    """Return a source for any value that a data set's function may return."""
    source = value if isinstance(value, Source) else _source_of_sets(value, config.name)
    facts = {"pack": "have one length", "pad": "have one length", "target": "have targets"}
    for key, fact in facts.items() if isinstance(source.train, BatchDataset) else ():
        if getattr(config, key):
            raise ConfigError(f"data.{key}: the rows of data.name={config.name} {fact}; remove it")
    collate = source.form.collate
    if config.collate:
        collate = arguments.call("data.collate", "data.collate", config.collate, {})
    form = replace(
        source.form,
        target=config.target,
        pad=config.pack or config.pad,
        packs=config.pack is not None,
        mask=None if config.pack else config.mask,
        collate=collate,
    )
    # A rank evaluates neighboring samples, so a single part of all shards is best for validation.
    train = adapted(source.train, config.name, seed, form, PARTS)
    sets = source.validation, *source.further.values()
    validation, *further = (adapted(samples, config.name, seed, form) for samples in sets)
    size, count = (-1, -1) if config.pack else (source.train_size, source.validation_size)
    if isinstance(validation, Stream) and count < 0:
        count = validation.count()
    classes = getattr(source.train, "classes", None)  # names, as in torchvision, or a number
    names = tuple(source.names or (classes if isinstance(classes, list | tuple) else ()))
    source = replace(
        source,
        train=train,
        validation=validation,
        train_size=size,
        validation_size=count,
        further=dict(zip(source.further, further, strict=True)),
        form=form,
        names=names,
        classes=source.classes or (classes if isinstance(classes, int) else len(names)),
    )
    inputs = _check_samples(source, config.name).inputs
    shape = tuple(inputs.shape[1:]) if isinstance(inputs, torch.Tensor) else ()
    return replace(source, shape=(config.pack,) if config.pack else source.shape or shape)


def _source_of_sets(value: Any, name: str) -> Source:
    """Return a source of training data, or of training and validation data."""
    train, validation, *rest = value if isinstance(value, tuple | list) else (value, None)
    if rest or isinstance(value, Mapping):
        got = f"{len(value)} values" if rest else f"a dictionary of {', '.join(map(str, value))}"
        raise ConfigError(
            f"data.name={name}: expected a Source, or training and validation data, got {got}; "
            "name further validation sets in a dictionary"
        )
    sets = (validation if isinstance(validation, dict) else {"": validation}) or {"": None}
    first, *others = sets
    if sets[first] is None:
        sets[first] = InMemory(torch.empty(0), torch.empty(0))
    return Source(train, sets[first], further={name: sets[name] for name in others})


def _check_samples(source: Source, name: str) -> Batch:
    """Return the first training sample; ConfigError if there is none, or another set differs."""
    sets = {"training": (source.train, source.train_size)}
    sets |= {f"{key} validation".lstrip(): pair for key, pair in source.validations.items()}
    if not source.validation_size and (source.further or isinstance(source.validation, Stream)):
        sets["first validation"] = source.validation, 0
    first: Batch | None = None
    for kind, (samples, size) in sets.items():
        if not size:
            wanted = "expected at least one; check its __len__"
            raise ConfigError(f"data.name={name}: the {kind} data has no samples; {wanted}")
        read = Reader(samples, f"the {kind} data", 0, source.form, name).read
        batch = read(Selection([0], [0], torch.ones(1))).batch
        first = first or batch
        for part, tree, expected in zip(("inputs", "targets"), batch, first, strict=False):
            if _leaf_paths(tree) != _leaf_paths(expected):
                raise ConfigError(
                    f"data.name={name}: the {part} of the {kind} data are {shape_of(tree)}, but "
                    f"those of the training data are {shape_of(expected)}; return samples of one "
                    "kind"
                )
    assert first is not None, "there is training data"
    return first


def _leaf_paths(tree: Any) -> set[str]:
    return {keystr(path) for path, _ in tree_flatten_with_path(tree)[0]}


def slow_imports(name: str) -> tuple[str, ...]:
    """Return the slow modules that a data set of the catalog imports, without importing them."""
    return _declared(name, "slow_imports") or () if name in DATA_SETS else ()


def without_samples(config: Data, facts: Mapping[str, Any]) -> Source | None:
    """Return a source without samples that can read files, if possible; `facts` is its identity."""
    shape = tuple(facts["shape"]) or (config.seq_len,)  # rows of unequal length
    classes, names = facts["classes"], tuple(facts["names"])
    read = _reader(config, classes)
    # A strategy learns the shapes from two samples; those of one dimension are tokens.
    is_tokens = len(shape) == 1
    inputs = torch.zeros(2, *shape, dtype=torch.int64 if is_tokens else torch.float32)
    zeros = InMemory(inputs, torch.zeros(2, *(shape if is_tokens else ()), dtype=torch.int64))
    return read and Source(zeros, zeros, 2, 2, shape, classes, names, read)


def _declared(name: str, attribute: str) -> Any:
    return getattr(load_attribute(DATA_SETS.get(name, name), "data.name"), attribute, None)


def _reader(config: Data, classes: int) -> ReadFiles | None:
    reader = _declared(config.name, "reader")
    return reader(config, classes) if reader else None
