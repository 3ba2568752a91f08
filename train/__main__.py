"""`python -m train [recipe or file] [key=value …]`: what happens, in order.

Exit codes: 0 done, 2 the request was refused, 75 stopped in order (start it again to continue),
anything else failed.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import train.packages as _packages  # noqa: F401
from train import config as schema
from train.commands import COMMANDS
from train.config import Config, ConfigError
from train.output import outlast_full_disks
from train.run import FencedError, RunDir, Verdict, default_name, write_atomic

if TYPE_CHECKING:
    from train.loop import Trainer
    from train.losses import Objective
    from train.parallel import Strategy
    from train.run import State
    from train.stop import StopSignals
    from train.world import World

EXIT_CODES = {"done": 0, "requeue": os.EX_TEMPFAIL, "stopped": os.EX_TEMPFAIL, "failed": 1}
USAGE = """\
Usage: python -m train [recipe or file.yaml] [key=value ...]
       torchrun --nproc_per_node=4 -m train [recipe or file.yaml] [key=value ...]
       python -m train COMMAND --help    ({commands})

  --help          this text
  --print-config  the complete configuration, as YAML
  --print-schema  the JSON schema of the configuration, for editors

Recipes: {recipes} (default: digits)

Keys, with default, type and meaning:
"""


def main(words: Sequence[str]) -> int:
    """Do what the command line asks; return the exit code."""
    if words and words[0] in COMMANDS:
        code: int = importlib.import_module(COMMANDS[words[0]]).main(words[1:])
        return code
    if "--help" in words or "-h" in words:
        print(_help())
        return 0
    if "--print-schema" in words:
        print(schema.schema(), end="")
        return 0
    try:
        recipe, config = schema.parse([word for word in words if word != "--print-config"])
    except ConfigError as error:
        return _refuse(error, everywhere=True)
    if "--print-config" in words:
        print(config.to_yaml(), end="")
        return 0
    return _run(recipe, config)


def _run(recipe: str, config: Config) -> int:
    # Only now torch: a mistake in the words is answered before it is imported.
    from train.faults.response import FaultError
    from train.stop import StopSignals
    from train.world import World

    outlast_full_disks()
    with StopSignals() as stop:
        try:
            world = World.join(config.device)
        except ConfigError as error:
            return _refuse(error)
        try:
            code = EXIT_CODES[train(recipe, config, world, stop)]
        except (ConfigError, FencedError) as error:
            code = _refuse(error, everywhere=True)
        except FaultError as error:
            _refuse(error, everywhere=True)
            code = EXIT_CODES["failed"]
        world.leave()
        return code


def train(recipe: str, config: Config, world: World, stop: StopSignals) -> State:
    """Train to the end or to a stop, in a world that is joined."""
    from train import losses, parallel, precision
    from train.faults import memory, watchdog
    from train.proof import trace

    started = time.perf_counter()
    precision.prepare(config.precision, world.device)
    scaler = precision.Scaler(world.device) if config.precision == "fp16" else None
    objective = losses.Objective(losses.build(config.train.loss), scaler)
    name = world.broadcast_text(config.run.name or default_name(recipe))
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    run_dir = RunDir(config.run.root, name)
    config = memory.with_proposal(config, run_dir, world)
    strategy = parallel.build(config, world, objective)
    # First what can still be refused: a model that does not fit leaves nothing behind, and what an
    # earlier attempt has left stays as it is.
    trainer = _prepare(config, world, run_dir, strategy, objective, stop)
    _open(run_dir, config, world)
    try:
        if world.is_main:
            print(f"rollcall: {strategy.describe()}", flush=True)
        trainer.resume()
        if config.log.fingerprints:
            trace.start(trainer)
        with watchdog.watch(trainer):
            state = trainer.run()
        weights = trace.conclude(trainer) if config.exact else ""
    except FencedError:  # what is told of the run is another attempt's now
        raise
    except Exception as error:
        if world.is_main:
            step = trainer.step
            reason = f"{type(error).__name__}: {error}"
            run_dir.record("failed", step=step, reason=reason)
            run_dir.conclude(Verdict("failed", step, reason))
        raise
    if world.is_main:
        _conclude(trainer, state, weights, time.perf_counter() - started)
    return state


def _open(run_dir: RunDir, config: Config, world: World) -> None:
    """Make or continue the run directory, and say where it is."""
    problem = ""
    if world.is_main:
        try:
            run_dir.create()
            run_dir.forget_verdict()
            run_dir.claim()
            write_atomic(run_dir.config, config.to_yaml())
            run_dir.record("started", world_size=world.world_size, launcher=world.place.launcher)
        except OSError as error:
            problem = f"{run_dir.path}: the run directory cannot be written: {error.strerror}"
        ranks = "1 rank" if world.world_size == 1 else f"{world.world_size} ranks"
        print(
            f"rollcall: {ranks} ({world.place.launcher}), {world.device.type}, "
            f"{config.parallel.mesh or config.parallel.strategy}; run directory {run_dir.path}",
            flush=True,
        )
    world.raise_together(problem)


def _prepare(
    config: Config,
    world: World,
    run_dir: RunDir,
    strategy: Strategy,
    objective: Objective,
    stop: StopSignals,
) -> Trainer:
    """Data, order, model, optimizer: the parts of a run, in the order they need."""
    from train import data, models, optim, speed
    from train.data.order import Order, training_batches
    from train.faults import crosscheck
    from train.loop import Trainer
    from train.randomness import set_seed

    source = data.load(config.data, world)
    order = Order.of_run(config, source.train_size)
    set_seed(config.seed, "model")
    model = models.adapt(models.build(config.model, source), config, world.device)
    crosscheck.check(world, config, model)
    # Two samples: a model with BatchNorm does not train on one.
    example = next(training_batches(source, order, range(2), range(order.steps)))
    size = world.world_size
    factors = speed.factors(model, example, source, config.precision, world.device, size)
    strategy.place(model, example)
    strategy.settle(example)
    if config.train.compile:
        models.compile_blocks(strategy.model)
    is_cut = config.data.micro_batch is not None
    warning = models.batchnorm.warning(strategy.model, strategy.data_ranks, is_cut)
    if warning and world.is_main:
        print(f"rollcall: warning: {warning}", file=sys.stderr, flush=True)
    optimizer = strategy.optimizer(partial(optim.build, config.optim))
    trainer = Trainer(config, world, run_dir, source, order, strategy, optimizer, objective, stop)
    trainer.speed_factors = factors
    return trainer


def _conclude(trainer: Trainer, state: State, weights: str, seconds: float) -> None:
    """Write the verdict and show the summary."""
    run_dir = trainer.run_dir
    asked = trainer.stop.received
    reason = {
        "done": f"{trainer.order.steps} steps trained",
        "stopped": "a person asked to stop",
        "requeue": "the end of the job is near"
        if trainer.deadline.has_come
        else f"asked to stop by {asked.name if asked else 'a signal on another rank'}",
        "failed": f"{trainer.order.steps} steps trained",
    }[state]
    if trainer.saver.problem:
        reason += f"; {trainer.saver.problem}"
    hashed = {"weights": weights} if weights else {}
    run_dir.record("finished", step=trainer.step, state=state, **hashed)
    run_dir.conclude(Verdict(state, trainer.step, reason))
    rows = {"result": f"{state}: {reason}", "step": f"{trainer.step} of {trainer.order.steps}"}
    if trainer.result:
        if trainer.result.accuracy is not None:
            rows["validation accuracy"] = f"{trainer.result.accuracy:.2%}"
        rows["validation loss"] = f"{trainer.result.loss:.4f}"
    if weights:
        rows["weights"] = f"{weights[:16]} (sha256)"
    rows |= trainer.saver.summary() | trainer.update.summary() | trainer.faults.summary()
    if trainer.metrics:
        rows["speed"] = f"{trainer.metrics.mean_rate:,.0f} samples/s"
        rows["time"] = f"{seconds:.1f} s"
        rows["run directory"] = str(run_dir.path)
        if state != "done":
            rows["to continue"] = f"the same command with run.name={run_dir.name}"
        trainer.metrics.summary(rows)


def _refuse(error: Exception, everywhere: bool = False) -> int:
    """Explain a refusal; one that every rank meets is told by rank 0 alone."""
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    rank = next((os.environ[name] for name in names if name in os.environ), "0")
    if rank == "0" or not everywhere:
        for line in str(error).splitlines():
            print(f"rollcall: error: {line}", file=sys.stderr)
    return 2


def _help() -> str:
    lines = [USAGE.format(commands=", ".join(COMMANDS), recipes=", ".join(schema.recipes()))]
    for name, kind, default, meaning in schema.describe():
        shown = "null" if default is None else default
        lines.append(f"  {name}={shown}  ({kind})\n      {meaning}")
    return "\n".join(lines)


def _exit(code: int) -> NoReturn:
    # A thread of gloo outlives the process group and may drop its last tensor while the interpreter
    # closes, which aborts the process (seen with torch 2.15): so do not close it. Ranks that were
    # forked by multiprocessing end in the same way by themselves.
    if multiprocessing.parent_process() is None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    _exit(main(sys.argv[1:]))
