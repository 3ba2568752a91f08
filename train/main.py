"""`python -m train [recipe or file] [key=value …]`: read the command line, join the world, train.

Exit codes: 0 done, 2 the request was refused, 75 stopped in order (start it again to continue),
anything else failed.
"""

import gc
import importlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import rollcall.requirements as _packages  # noqa: F401
from rollcall import config as schema
from rollcall import process
from rollcall.commands import TRAIN
from rollcall.config import Config, ConfigError, arguments, help
from rollcall.refusal import PATIENCE, REFUSED, refuse
from rollcall.run_dir import FencedError
from rollcall.train.dist import failure

if TYPE_CHECKING:
    from rollcall.train.dist.signals import StopSignals
    from rollcall.train.dist.world import World

EXIT_CODES = {"done": 0, "requeue": os.EX_TEMPFAIL, "stopped": os.EX_TEMPFAIL, "failed": 1}


def main(words: Sequence[str]) -> int:
    """Do what the command line asks, and return the exit code."""
    if words and words[0] in TRAIN:
        return int(importlib.import_module(TRAIN[words[0]].module).main(words[1:]))
    if "--help" in words or "-h" in words:
        return help.main(words)
    if "--print-schema" in words:
        print(schema.json_schema(), end="")
        return 0
    try:
        recipe, config = schema.parse([word for word in words if word != "--print-config"])
        arguments.check_modules(config.model_dump())  # before seconds of imports
    except ConfigError as error:
        return refuse(error)
    if "--print-config" in words:
        print(config.to_yaml(), end="")
        return 0
    process.outlast_full_disks()
    gc.disable()  # until the imports are done, of whose time collections would take a quarter
    try:
        return on_all_ranks(config.device, partial(_train, recipe, config))
    except Exception as error:
        failure.tell_torchrun(error)
        raise
    finally:
        gc.enable()


def _train(recipe: str, config: Config, world: "World", signals: "StopSignals") -> int:
    from rollcall.train.training import train

    # The collection before the first step leaves out what was imported, as in forked ranks, whose
    # parent has frozen it.
    if not process.is_fork:
        gc.freeze()
    gc.enable()
    try:
        return EXIT_CODES[train(recipe, config, world, signals)]
    finally:
        if not process.is_fork:
            gc.unfreeze()


def on_all_ranks(device: str, work: "Callable[[World, StopSignals], int]") -> int:
    """Join all ranks on a kind of device, and do the work; return its exit code.

    If the work is refused or cannot continue, one rank says so.
    """
    # torch is imported only now, so that a wrong command line is answered at once.
    from rollcall.train.dist.agreement import FaultError
    from rollcall.train.dist.signals import StopSignals
    from rollcall.train.dist.world import World

    with StopSignals() as signals:
        try:
            world = World.join(device)
        except ConfigError as error:
            return refuse(error, everywhere=False)
        refusal: Exception | None = None
        try:
            code = work(world, signals)
        except (ConfigError, FencedError) as error:
            refusal, code = error, REFUSED
        except FaultError as error:
            refusal, code = error, EXIT_CODES["failed"]
    if refusal is not None:  # not before: the launcher's signals end a rank that waits
        refuse(refusal, patience=0 if signals.received else PATIENCE)
    world.leave()
    return code
