"""One run on this rank: build its parts, train, and write how it ended."""

import gc
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch

from rollcall.config import Config, ConfigError, arguments
from rollcall.deadline import Deadline
from rollcall.process import keep_output
from rollcall.records.files import write_atomic
from rollcall.run_dir import FencedError, RunDir, State, Verdict, default_name
from rollcall.train import models
from rollcall.train.checkpoint.saver import Saver
from rollcall.train.data import packing, sets
from rollcall.train.data.calling import check_arguments
from rollcall.train.data.source import Source
from rollcall.train.dist import failure
from rollcall.train.dist.agreement import Member
from rollcall.train.dist.device import chip_name
from rollcall.train.dist.run import Run
from rollcall.train.dist.signals import StopSignals
from rollcall.train.dist.stop import Stop
from rollcall.train.dist.world import World
from rollcall.train.exact import recorder
from rollcall.train.exact.recorder import Recorder
from rollcall.train.exact.strategy import Exact
from rollcall.train.health import crosscheck, watchdog
from rollcall.train.health.replicas import Replicas
from rollcall.train.health.spread import Spread
from rollcall.train.loggers import Callbacks
from rollcall.train.metrics import Metrics
from rollcall.train.models import huggingface
from rollcall.train.numerics import losses, optim, precision
from rollcall.train.numerics.ema import drop_gathered
from rollcall.train.numerics.randomness import set_seed
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.profiling import flops
from rollcall.train.profiling.phases import PhaseTimes
from rollcall.train.profiling.profiler import Profiler
from rollcall.train.recovery import memory, micro_batch
from rollcall.train.recovery.micro_batch import Search
from rollcall.train.task import Task
from rollcall.train.trainer import Trainer
from rollcall.train.update import Update
from rollcall.train.weights.start import Start, start


def train(recipe: str, config: Config, world: World, signals: StopSignals) -> State:
    """Train to the end or to a stop, in a world that this process has joined."""
    started = time.perf_counter()
    run = memory.with_proposal(_named(recipe, config, world))
    if is_searched := run.config.data.micro_batch == "auto":
        run = _with_fastest(run, signals)
    parts = _build(run, signals)  # a run that is refused leaves nothing behind
    before = _Before.read(run)
    _open(run)
    size = parts.trainer.update.micro_batch
    if is_searched and size and world.is_main:  # a resumed run keeps it, to stay exact
        memory.propose(run.run_dir, size, is_fastest=True)
    parts.spread.record()
    if parts.started_from:
        run.record("initialized", report=parts.started_from)
    trainer = parts.trainer
    try:
        if world.is_main:
            run.say(f"rollcall: {parts.strategy.describe()}")
        try:
            trainer.resume()
            parts.callbacks.open()
        except ConfigError:
            before.put_back(run)
            raise
        if run.config.log.fingerprints:
            parts.recorder.begin()
        watch = watchdog.watch(run, parts.strategy.model, lambda: trainer.step)
        shown = parts.metrics.shown(trainer.step)
        with watch, shown, closing(parts.callbacks), closing(parts.profiler):
            parts.profiler.begin()
            state = trainer.train()
        weights = _conclude_exact(run, parts) if run.config.exact else ""
    except FencedError:  # the files of the run belong to another attempt now
        raise
    except Exception as error:
        failure.tell_run(run.run_dir, world.rank, error)
        if world.is_main:
            reason = failure.describe(error)
            run.record("failed", step=trainer.step, reason=reason)
            if run.run_dir.read_verdict() is None:  # else it was put back
                problem = run.run_dir.try_to_conclude(Verdict("failed", trainer.step, reason))
                if problem:
                    print(f"rollcall: warning: {problem}", file=sys.stderr, flush=True)
        raise
    if world.is_main:
        _conclude(run, parts, state, weights, time.perf_counter() - started)
    return state


def try_micro_batches(run: Run, signals: StopSignals, limit: float | None = None) -> Search:
    """Build the parts of a run and try micro-batches; the parts are thrown away."""
    parts = _build(memory.with_micro_batch(run, None), signals)
    rows = len(parts.strategy.rows(run.config.data.global_batch))
    batch = parts.trainer.task.example(rows).to(run.world.device)
    update = parts.trainer.update
    update.state()  # the state of the optimizer needs memory too
    return micro_batch.search(run.world, update.try_gradient, batch, limit)


def _with_fastest(run: Run, signals: StopSignals) -> Run:
    """Return the run with the fastest micro-batch that fits.

    Raises:
        ConfigError: not even one sample fits.
    """
    found = try_micro_batches(run, signals)
    gc.collect()  # the parts of the trials
    if run.world.device.type == "cuda":
        torch.cuda.empty_cache()
    if found.fastest is None:
        raise ConfigError(
            "data.micro_batch=auto: not even one sample fits into memory; choose a smaller model, "
            "model.activation_checkpointing=blocks, or parallel.strategy=zero3"
        )
    size = found.fastest.size
    run.say(f"rollcall: data.micro_batch={size}, the fastest that fits")
    return memory.with_micro_batch(run, size)


@dataclass(frozen=True)
class _Parts:
    strategy: Strategy
    trainer: Trainer
    stop: Stop
    metrics: Metrics
    recorder: Recorder
    spread: Spread
    callbacks: Callbacks
    profiler: Profiler
    started_from: str  # what was read of `model.init`


@dataclass(frozen=True)
class _Before:
    """The configuration and verdict before this attempt, on rank 0; a refusal restores them."""

    config: str
    verdict: Verdict | None

    @classmethod
    def read(cls, run: Run) -> "_Before":
        path, is_here = run.run_dir.config, run.world.is_main
        config = path.read_text(errors="replace") if is_here and path.exists() else ""
        return cls(config, run.run_dir.read_verdict() if is_here else None)

    def put_back(self, run: Run) -> None:
        if self.config:
            write_atomic(run.run_dir.config, self.config)
        if self.verdict:
            run.run_dir.conclude(self.verdict)


def _build(run: Run, signals: StopSignals) -> _Parts:
    """Build the parts of a run in the order in which they need each other; write nothing."""
    config, world = run.config, run.world
    set_seed(config.seed, "process")  # for data sets and losses that draw when they are made
    precision.prepare(config.precision, world.device)
    scaler = precision.Scaler(world.device) if config.precision == "fp16" else None
    objective = losses.Objective(losses.of(config), scaler)
    recorder = Recorder(run, lambda: trainer.step)
    strategy = (
        Exact(config, world, objective, recorder.step)
        if config.exact
        else Strategy(config, world, objective)
    )
    loss = objective.loss
    source = sets.load(config.data, world, config.seed).learned_by(loss)
    deadline = Deadline(run.run_dir.path)
    stop = Stop(world, signals, deadline, lambda: saver.seconds)
    task = Task(run, source, strategy, loss, stop)
    example = task.example()
    loss.check_targets(example.targets)
    spread = Spread(run, strategy, example)
    begin, factors = _place_model(run, source, spread, strategy, loss)
    optimizer = strategy.optimizer(partial(optim.build, config.optim))
    update = Update(run, task.order, strategy, optimizer, objective)
    saver = Saver(run, update.state, deadline, huggingface.facts(strategy.model))
    strategy.watch(waits=world.device.type == "cpu" and not config.train.compile)
    profiler = Profiler(run, lambda: trainer.step, task.order.steps)
    phases = PhaseTimes(run, lambda: trainer.step >= task.order.steps, profiler.plan)
    callbacks = Callbacks(run, lambda: strategy.model)
    task.on_logged = callbacks.logged
    metrics = Metrics(run, task, factors, phases.fields, callbacks.logged)
    replicas = Replicas(run, strategy)
    members: list[Member] = [stop, phases, metrics, replicas, callbacks]
    trainer = Trainer(run, task, update, saver, members)
    return _Parts(
        strategy, trainer, stop, metrics, recorder, spread, callbacks, profiler, begin.report
    )


def _place_model(
    run: Run, source: Source, spread: Spread, strategy: Strategy, loss: losses.Loss
) -> tuple[Start, dict[str, float]]:
    """Build the model and spread it.

    Return its start, and factors from samples per second to other figures.
    """
    config, world = run.config, run.world
    begin = start(run, models.maker(config, source, world.device))
    model = begin.model
    crosscheck.check(world, config, model)
    example = spread.example
    factors = flops.factors(run, model, example, source)
    spread.compute_plain(model, begin.whole)
    strategy.place(model, example, begin.fill)
    if not loss.takes_model:
        check_arguments(model, example)
    # All ranks learn whether it returns weights; a pipeline's would not.
    if loss.is_own and not loss.takes_model:
        example = example.to(world.device)
        loss(strategy.forward(example), example.targets)
    strategy.warm_up(example)
    spread.compare()
    if config.data.pack:
        example = spread.example.to(world.device)
        packing.refuse_leaks(strategy.forward, strategy.model, source.form, example)
    drop_gathered(strategy.model)  # of a forward pass without a backward pass
    if config.train.compile:
        models.compile_blocks(strategy.model)
    batch, is_cut = config.data.global_batch, config.data.micro_batch is not None
    warning = models.batchnorm.warning(strategy.model, strategy.data_ranks, batch, is_cut)
    if warning and world.is_main:
        print(f"rollcall: warning: {warning}", file=sys.stderr, flush=True)
    return begin, factors


def _named(recipe: str, config: Config, world: World) -> Run:
    """Return the run, with the name that rank 0 gives it unless it has one."""
    name = world.broadcast_text(config.run.name or default_name(recipe))
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    config = arguments.complete(config, arguments.inspected)
    return Run(config, world, RunDir(config.run.root, name))


def _open(run: Run) -> None:
    """Create the run directory or continue in it, and print where it is."""
    config, world, run_dir = run.config, run.world, run.run_dir
    launcher = world.place.launcher
    problem = ""
    if world.is_main:
        try:
            run_dir.create()
            if run_dir.checkpoints.exists():
                next(run_dir.checkpoints.iterdir(), None)  # refused, rather than started again
            run_dir.forget_verdict()
            run_dir.claim()
            write_atomic(run_dir.config, config.to_yaml())
            chip = chip_name(world.device)
            run.record("started", world_size=world.world_size, launcher=launcher, chip=chip)
        except OSError as error:
            place = error.filename or run_dir.path
            problem = f"{place}: the run directory cannot be used: {error.strerror}"
    world.raise_together(problem)
    _keep_output(run)
    ranks = "1 rank" if world.world_size == 1 else f"{world.world_size} ranks"
    run.say(
        f"rollcall: {ranks} ({launcher}), {world.device.type}, "
        f"{config.parallel.mesh or config.parallel.strategy}; run directory {run_dir.path}"
    )


def _keep_output(run: Run) -> None:
    """Keep what the ranks print, as supervisors do, so that `rollcall logs` can show it."""
    world, run_dir = run.world, run.run_dir
    attempt = int(world.broadcast_text(str(run_dir.next_attempt()) if world.is_main else ""))
    if not run_dir.keeps(1):
        node = world.rank // world.place.local_world_size
        keep_output(run_dir.log(attempt, node, world.rank))


def _conclude_exact(run: Run, parts: _Parts) -> str:
    weights = parts.trainer.update.state()["model"]
    parts.recorder.end(weights)
    return recorder.conclude(run.world, weights)


def _conclude(run: Run, parts: _Parts, state: State, weights: str, seconds: float) -> None:
    """Write the verdict and print the summary; `weights` is their hash in exact mode, or empty."""
    trainer = parts.trainer
    asked, early = trainer.task.order.steps, trainer.task.patience.reason
    steps = max(trainer.step, asked)
    past = f"; this run was already past the {asked} that were asked for" * (steps > asked)
    trained = f"{trainer.step} step{'s' * (trainer.step != 1)} trained"
    reason = {
        "done": f"{trained}{past}{f'; stopped early: {early}' * bool(early)}",
        "stopped": "a person asked to stop",
        "requeue": parts.stop.reason,
        "failed": trained,
    }[state]
    if trainer.saver.problem:
        reason += f"; {trainer.saver.problem}"
    hashed = {"weights": weights} if weights else {}
    run.record("finished", step=trainer.step, state=state, **hashed)
    problem = run.run_dir.try_to_conclude(Verdict(state, trainer.step, reason))
    rows = {"result": f"{state}: {reason}", "step": f"{trainer.step} of {steps}"}
    rows |= trainer.task.summary()
    if weights:
        rows["weights"] = f"{weights[:16]} (sha256)"
    rows |= trainer.saver.summary() | trainer.update.summary() | parts.metrics.summary()
    rows["time"] = f"{seconds:.1f} s"
    rows["run directory"] = str(run.run_dir.path)
    if problem:
        rows["verdict"] = problem
    if state != "done":
        rows["to continue"] = f"the same command with run.name={run.run_dir.name}"
    parts.metrics.show_summary(rows)
