"""The data sets. Each is a file here and a line in `rollcall/config/catalog.py`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from rollcall.config import arguments
from rollcall.config.catalog import DATA_SETS
from rollcall.config.plugin import load_attribute
from rollcall.config.schema import ConfigError, Data
from rollcall.train.data.reader import Reader, Selection
from rollcall.train.data.source import InMemory, ReadFiles, Source
from rollcall.train.data.stream import Stream, adapted
from rollcall.train.dist.world import World


def load(config: Data, world: World, seed: int = 0) -> Source:
    """Load the data that the configuration names; every rank must call this together.

    Raises:
        ConfigError: the data set is unknown, or its files are missing.
    """
    if config.augment and config.name in DATA_SETS and not _declared(config.name, "augments"):
        able = [name for name in DATA_SETS if _declared(name, "augments")]
        raise ConfigError(
            f"data.augment=true: data.name={config.name} has no augmentation; remove it, or choose "
            f"{', '.join(able)}"
        )
    given = {"config": config, "world": world}
    source = arguments.call("data.name", "data.args", config.name, config.args, **given)
    source = _source(source, config, seed)
    return replace(source, read=source.read or _reader(config, source.classes))


def _source(made: Any, config: Data, seed: int) -> Source:
    """Return the source that a function of the user's returned, in whatever form."""
    found: Source
    if isinstance(made, Source):
        found = made
    else:
        train, validation, *rest = made if isinstance(made, tuple | list) else (made, None)
        if rest:
            raise ConfigError(
                f"data.name={config.name}: expected a Source, or training and validation data, got "
                f"{len(rest) + 2} values; name further validation sets in a dictionary"
            )
        sets: dict[str, Any] = validation if isinstance(validation, dict) else {"": validation}
        first, *others = sets
        main = InMemory(torch.empty(0), torch.empty(0)) if sets[first] is None else sets[first]
        found = Source(train, main, further={name: sets[name] for name in others})
    collate = found.form.collate
    if config.collate:
        collate = arguments.call("data.collate", "data.collate", config.collate, {})
    form = replace(
        found.form,
        target=config.target,
        pad=config.pack or config.pad,
        packs=config.pack is not None,
        mask=None if config.pack else config.mask,
        collate=collate,
    )
    every: list[Any] = [found.train, found.validation, *found.further.values()]
    train, validation, *further = (adapted(one, config.name, seed, form) for one in every)
    size, count = (-1, -1) if config.pack else (found.train_size, found.validation_size)
    if isinstance(validation, Stream) and count < 0:
        count = validation.count()
    names = tuple(found.names or getattr(found.train, "classes", None) or ())
    known = replace(
        found,
        train=train,
        validation=validation,
        train_size=size,
        validation_size=count,
        further=dict(zip(found.further, further, strict=True)),
        form=form,
        names=names,
        classes=found.classes or len(names),
    )
    shape = (config.pack,) if config.pack else found.shape
    return replace(known, shape=shape or _shape(known, config.name))


def _shape(source: Source, name: str) -> tuple[int, ...]:
    """Return the shape of one input that is a tensor; () for others."""
    read = Reader(source.train, "the training data", 0, source.form, name).read
    inputs = read(Selection([0], [0], torch.ones(1))).batch.inputs
    return tuple(inputs.shape[1:]) if isinstance(inputs, torch.Tensor) else ()


def slow_imports(name: str) -> tuple[str, ...]:
    """Return the slow modules that a data set of the catalog imports, without importing them."""
    return _declared(name, "slow_imports") or () if name in DATA_SETS else ()


def without_samples(config: Data, facts: Mapping[str, Any]) -> Source | None:
    """Return a source without samples that can read files, if possible; `facts` is its identity."""
    shape, classes, names = tuple(facts["shape"]), facts["classes"], tuple(facts["names"])
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
