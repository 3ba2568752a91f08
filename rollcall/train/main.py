"""`python -m train [recipe or file] [key=value …]`: read the command line, join the world, train.

Exit codes: 0 done, 2 the request was refused, 75 stopped in order (start it again to continue),
anything else failed.
"""

import contextlib
import gc
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import rollcall.messages.requirements as _packages  # noqa: F401
from rollcall import config as schema
from rollcall.cli.commands import TRAIN
from rollcall.cli.installation import IS_CHECKOUT, ROOT, environment
from rollcall.config import Config, ConfigError, arguments, checks, help
from rollcall.messages.refusal import FENCED, PATIENCE, REFUSED, RankError, refuse
from rollcall.messages.text import announce, is_first_rank, note
from rollcall.records.job import JobRecord
from rollcall.records.run_dir import FencedError
from rollcall.system import process
from rollcall.system.files import is_there
from rollcall.train.ranks import failure
from rollcall.train.ranks.signals import StopSignals, end_at_once

if TYPE_CHECKING:
    from rollcall.train.ranks.world import World

EXIT_CODES = {"done": 0, "requeue": os.EX_TEMPFAIL, "stopped": os.EX_TEMPFAIL, "failed": 1}

INTERRUPTED = (
    "rollcall: stopped without saving; to continue from the newest checkpoint, if there is one, "
    "use the same command with run.name=RUN"
)
LAUNCHERS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK"}
"""Variables of a process that a launcher has started, perhaps with others."""
RANKS = re.compile(r"(?:--(?:ranks|nproc(?:[-_]per[-_]node)?)|-np?)(?:=(.*))?")
"""Matches the option that starts ranks, also in the spelling of torchrun, mpiexec and srun."""


def main(words: Sequence[str]) -> int:
    """Do what the command line asks, and return the exit code."""
    try:
        return _main(words)
    except KeyboardInterrupt:  # before the run could save, or the second one
        if words and words[0] in TRAIN:
            raise
        if is_first_rank():
            print(INTERRUPTED, file=sys.stderr)
        return EXIT_CODES["stopped"]


def _main(words: Sequence[str]) -> int:
    if words and words[0] in TRAIN:
        return int(importlib.import_module(f"rollcall.{TRAIN[words[0]].module}").main(words[1:]))
    if "--help" in words or "-h" in words:
        pairs = pairwise(["", *words])
        return help.main([word for last, word in pairs if not RANKS.fullmatch(last)])
    if "--print-schema" in words:
        print(schema.json_schema(), end="")
        return 0
    try:
        is_launched = not LAUNCHERS.isdisjoint(os.environ) or (
            os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"
        )
        ranks, rest, recipe, config = ask(words, None if is_launched else 1)
    except ConfigError as error:
        return refuse(error)
    if "--print-config" in words:
        print(config.to_yaml(), end="")
        return 0
    if ranks:  # become torchrun
        program = [f"{ROOT}/env/bin/torchrun"] if IS_CHECKOUT else ["-m", "torch.distributed.run"]
        options = ["--standalone", f"--nproc-per-node={ranks}", "-m", "rollcall.train"]
        os.execve(sys.executable, [sys.executable, *program, *options, *rest], environment())
    if is_first_rank():
        for remark in checks.without_effect(config, {word.partition("=")[0] for word in words}):
            note(remark)
    announce("importing PyTorch")
    sys.excepthook = failure.show
    process.outlast_full_disks()
    gc.disable()  # until the imports are done, of whose time collections would take a quarter
    try:
        return on_all_ranks(config.device, partial(_train, recipe, config), INTERRUPTED)
    except Exception as error:
        failure.tell_torchrun(error)
        raise
    finally:
        gc.enable()


def ask(words: Sequence[str], size: int | None) -> tuple[int, Sequence[str], str, Config]:
    """Return the ranks to start, the other words, and the recipe and configuration they ask for.

    `size` is the number of ranks that a launcher starts, 1 without one; None if it is not known.
    ConfigError: they cannot train, as far as that is known without torch.
    """
    ranks, rest = _asked_ranks(words)
    is_draft = "--print-config" in words
    words = [word for word in rest if word != "--print-config"]
    recipe, config = schema.parse(words, is_draft)
    arguments.check_modules(config)  # before seconds of imports
    if is_draft:
        return ranks, rest, recipe, config
    arguments.check_surroundings(config)
    run = config.run.name and Path(config.run.root, config.run.name)
    exists = bool(run and is_there(run / "config.yaml"))
    if run and not exists and "ROLLCALL_RUN_DIR" not in os.environ:  # a script may train in its own
        record = JobRecord.read(run)
        if record and not record.is_training:
            raise ConfigError(f"run.name: {run} is the run of a script; choose another name")
    if ranks and size != 1:
        raise ConfigError("--ranks: a launcher starts the ranks already; remove this option")
    if size := ranks or size:
        config.parallel.degrees(size, size)
    return ranks, rest, recipe, config


def _asked_ranks(words: Sequence[str]) -> tuple[int, Sequence[str]]:
    """Return the number of ranks to start, 0 if no option asks for some, and the other words."""
    for number, word in enumerate(words):
        if RANKS.fullmatch(word):
            option, equals, count = word.partition("=")
            end = number + (1 if equals else 2)
            count = count or "".join(words[number + 1 : end])
            if not count.isdecimal() or int(count) < 1:
                raise ConfigError(f"{option}: expected a number of ranks such as 4, got '{count}'")
            rest = [*words[:number], *words[end:]]
            if any(map(RANKS.fullmatch, rest)):
                raise ConfigError(f"{option}: the number of ranks is given twice; leave one out")
            return int(count), rest
    return 0, words


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


def on_all_ranks(
    device: str, work: "Callable[[World, StopSignals], int]", interrupted: str = "rollcall: stopped"
) -> int:
    """Join all ranks and do the work; return its exit code. One rank says why it was refused."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    # Not in /tmp, where another user may have made the folder that torch would use.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{cache}/torchinductor")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else it warns of hosts without DNS
    is_supervised = "ROLLCALL_WORLD_SIZE" in os.environ  # its supervisor knows what a signal means
    text = f"{interrupted}\n" if is_first_rank() else ""
    with StopSignals() as signals:
        try:
            with contextlib.nullcontext() if is_supervised else end_at_once(text):
                # torch is imported only now, so that a wrong command line is answered at once.
                from rollcall.train.ranks.agreement import FaultError
                from rollcall.train.ranks.world import World

                world = World.join(device)
        except ConfigError as error:
            return refuse(error, everywhere=False)
        refusal: Exception | None = None
        try:
            code = work(world, signals)
        except (ConfigError, FencedError) as error:
            refusal = error
            code = FENCED if isinstance(error, FencedError) else REFUSED
        except FaultError as error:
            refusal, code = error, EXIT_CODES["failed"]
    if refusal is not None:  # not before: the launcher's signals end a rank that waits
        is_alone = isinstance(refusal, RankError)
        refuse(refusal, everywhere=not is_alone, patience=0 if signals.received else PATIENCE)
        if is_alone:  # the others wait in a collective, so this process must end first
            return code
    world.leave()
    return code
