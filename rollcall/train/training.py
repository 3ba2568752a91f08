"""One run on this rank: build its parts, train, and write how it ended."""

import gc
import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rollcall.config import Config, ConfigError, arguments
from rollcall.messages.refusal import RankError
from rollcall.messages.text import announce, counted
from rollcall.records.attempt import LOST_PEER
from rollcall.records.run_dir import FencedError, RunDir, State, Verdict, default_name
from rollcall.system.files import write_atomic
from rollcall.system.process import keep_output
from rollcall.train import models
from rollcall.train.checkpoint.saver import Saver
from rollcall.train.data import packing, sets
from rollcall.train.data.source import Batch, Source
from rollcall.train.exact.recorder import Recorder
from rollcall.train.exact.strategy import Exact
from rollcall.train.health import crosscheck
from rollcall.train.health.replicas import Replicas, Units
from rollcall.train.health.spread import Spread
from rollcall.train.health.watchdog import Watchdog
from rollcall.train.loggers import Callbacks
from rollcall.train.metrics import Metrics
from rollcall.train.models import huggingface
from rollcall.train.numerics import losses, optim, precision, trial
from rollcall.train.numerics.ema import drop_gathered
from rollcall.train.numerics.hidden import left_alone
from rollcall.train.numerics.randomness import set_seed
from rollcall.train.parallel.part import check_arguments
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.profiling import flops
from rollcall.train.profiling.phases import PhaseTimes
from rollcall.train.profiling.profiler import Profiler
from rollcall.train.ranks import failure
from rollcall.train.ranks.agreement import Member
from rollcall.train.ranks.deadline import Deadline
from rollcall.train.ranks.device import chip_name
from rollcall.train.ranks.meeting import Failed
from rollcall.train.ranks.members import REPLACES
from rollcall.train.ranks.run import Run
from rollcall.train.ranks.signals import StopSignals
from rollcall.train.ranks.stop import GoOn, Stop
from rollcall.train.ranks.world import World
from rollcall.train.recovery import memory, micro_batch
from rollcall.train.state import Kept, TrainingState
from rollcall.train.task import Task
from rollcall.train.trainer import Trainer
from rollcall.train.weights.start import Start, start


def train(recipe: str, config: Config, world: World, signals: StopSignals) -> State:
    """Train to the end or to a stop, in a world that this process has joined."""
    kept = Kept() if REPLACES in os.environ else None  # the other ranks have the state
    try:
        while True:
            try:
                return _train(recipe, config, world, signals, kept)
            except GoOn as end:
                (kept,) = end.args
            world = world.again()  # not before: what an exception holds is closed only now
    except SystemExit as error:  # its code, such as 0, would say how the run ended
        raise RuntimeError(failure.describe(error)) from error


def _train(recipe: str, config: Config, world: World, signals: StopSignals, kept: Any) -> State:
    started = time.perf_counter()
    run = memory.with_proposal(_named(recipe, config, world))
    if is_searched := run.config.data.micro_batch == "auto":
        run = _with_fastest(run, signals)
    announce("reading the data and building the model")
    # A run that is refused leaves nothing behind.
    parts = _build(run, signals, checks=False) if kept else _build_twice(run, signals)
    put_back, begun = _kept_files(run), None
    _open(run)
    size = parts.trainer.steps.gradient.micro_batch
    if is_searched and size and world.is_main:  # a resumed run keeps it, to stay exact
        memory.propose(run.run_dir, size, is_fastest=True)
    parts.spread.record()
    if parts.start.report:
        run.record("initialized", report=parts.start.report)
    trainer, device = parts.trainer, world.device
    try:
        if world.is_main:
            run.say(f"rollcall: {parts.strategy.describe()}")
            if advice := not run.config.exact and precision.advice(run.config.precision, device):
                run.say(f"rollcall: {advice}")
        if not trainer.resume(kept) and parts.start.resumes:
            raise ConfigError(f"{run.run_dir.checkpoints} was emptied meanwhile: start again")
        trainer.state.adopt(parts.callbacks.open(parts.strategy.model))
        begun = run.progress.step
        if run.config.log.fingerprints:
            parts.recorder.begin()
        patience = run.config.faults.hang_seconds
        watch: AbstractContextManager[object] = nullcontext()
        if patience is not None:
            watch = Watchdog(run, parts.strategy.model, patience)
        profiler, shown = parts.profiler, parts.metrics.shown(run.progress.step)
        with watch, shown, run.measures.of_process(), closing(parts.callbacks), closing(profiler):
            profiler.after_step()  # as the first one may be profiled
            state = trainer.train()
        weights = parts.recorder.end(trainer.state.read()["model"]) if run.config.exact else ""
    except (FencedError, GoOn):  # the files of the run belong to another attempt now, or group
        raise
    except (Exception, SystemExit) as error:
        is_alone = isinstance(error, RankError) and world.world_size > 1
        is_refused = isinstance(error, ConfigError) and not is_alone
        if is_refused and begun in (None, run.progress.step) and put_back():
            raise
        failure.tell_run(run.run_dir, world.rank, error)
        if world.is_main:
            reason = failure.describe(error)
            run.record("failed", step=run.progress.step, reason=reason)
            is_victims = "ROLLCALL_WORLD_SIZE" in os.environ and LOST_PEER.search(reason)
            if run.run_dir.read_verdict() is None and not is_victims:  # else it was put back
                verdict = Verdict("failed", run.progress.step, reason)
                run.warn(run.run_dir.try_to_conclude(verdict))
        raise
    if world.is_main:
        _conclude(run, parts, state, weights, time.perf_counter() - started)
    return state


def _try_micro_batches(run: Run, signals: StopSignals) -> micro_batch.Trial | None:
    """Build the parts of a run and try micro-batches; the parts are thrown away."""
    parts = _build_twice(memory.with_micro_batch(run, None), signals)
    rows = len(parts.strategy.rows(run.config.data.global_batch))
    batch = parts.trainer.task.example(rows).to(run.world.device)
    parts.trainer.state.read()  # the state of the optimizer needs memory too
    gradient = parts.trainer.steps.gradient

    def fits_memory(part: Batch) -> bool:
        gradient.compute(part, 1)
        gradient.drop()
        return not gradient.is_exhausted

    return micro_batch.search(run.world, fits_memory, batch)


def _with_fastest(run: Run, signals: StopSignals) -> Run:
    """Return the run with the fastest micro-batch; ConfigError if not even one sample fits."""
    found = _try_micro_batches(run, signals)
    _free(run.world)
    if found is None:
        raise ConfigError(
            "data.micro_batch=auto: not even one sample fits into memory; choose a smaller model, "
            "model.activation_checkpointing=blocks, or parallel.strategy=zero3"
        )
    run.say(f"rollcall: data.micro_batch={found.size}, the fastest that fits")
    return memory.with_micro_batch(run, found.size)


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
    start: Start


def _kept_files(run: Run) -> Callable[[], bool]:
    """Return a function that restores the files of the attempt before, on rank 0.

    A new run it deletes, unless a supervisor has made it; then it returns True, on all ranks that
    refuse it with rank 0.
    """
    run_dir, is_main = run.run_dir, run.world.is_main
    is_new = run.world.has_any(is_main and not run_dir.path.exists())
    config = run_dir.config.read_text(errors="replace") if run_dir.config.exists() else ""
    verdict = run_dir.read_verdict()

    def put_back() -> bool:
        if is_main:
            with suppress(FileNotFoundError):  # the directory was removed
                run_dir.check_claim()  # another attempt may have taken it
        if is_new and is_main:
            shutil.rmtree(run_dir.path, ignore_errors=True)
        elif is_main:
            if config:
                write_atomic(run_dir.config, config)
            if verdict:
                run_dir.conclude(verdict)
        end = time.monotonic() + 1  # rank 0 deletes nothing if only this rank refuses
        while is_new and run_dir.path.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return is_new and not run_dir.path.exists()

    return put_back


def _build_twice(run: Run, signals: StopSignals) -> _Parts:
    """Build the parts of a run; again and without the check if there is too little memory for it.

    A pass that ended in the middle leaves FSDP2 and DDP unable to begin another.
    """
    with suppress(Failed):
        return _build(run, signals)
    _free(run.world)
    return _build(run, signals, checks=False)


def _free(world: World) -> None:
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def _build(run: Run, signals: StopSignals, checks: bool = True) -> _Parts:
    """Build the parts of a run in the order in which they need each other; write nothing."""
    config, world = run.config, run.world
    set_seed(config.seed, "process")  # for data sets and losses that draw when they are made
    precision.prepare(config.precision, world.device)
    scaler = precision.Scaler(world.device) if config.precision == "fp16" else None
    objective = losses.Objective(losses.of(config), scaler)
    recorder = Recorder(run)
    given = config, world, objective
    strategy = Exact(*given, recorder.step) if config.exact else Strategy(*given)
    loss = objective.loss
    source = sets.load(config.data, world, config.seed).learned_by(loss)
    deadline = Deadline(run.run_dir.path)
    stop = Stop(world, signals, deadline)
    callbacks = Callbacks(run)
    task = Task(run, source, strategy, stop, callbacks.logged)
    spread = Spread(run, strategy, task.example)
    spread.is_on &= checks
    loss.check_targets(spread.example.targets)
    run.warn(task.draws_by_rank())
    begin, factors = _place_model(run, source, spread, strategy, loss)
    if config.parallel.check != "off":
        mesh = strategy.sharding_mesh
        refusal, warning = trial.check(config.optim, world, mesh, strategy.model)
        if refusal:
            raise ConfigError(f"{refusal}; or set parallel.check=off to train anyway")
        run.warn(warning)
    optimizer = strategy.optimizer(partial(optim.build, config.optim))
    state = TrainingState(run, strategy, optimizer, objective)
    state.adopt(task.metrics)
    saver = Saver(run, state.read, deadline, huggingface.facts(strategy.model))
    strategy.watch(waits=world.device.type == "cpu" and not config.train.compile)
    profiler = Profiler(run)
    phases = PhaseTimes(run, profiler.plan)
    metrics = Metrics(run, task, factors, phases.fields)
    replicas = Replicas(run, strategy)
    members: list[Member[Any]] = [phases, metrics, replicas, callbacks]
    if strategy.sharding and world.world_size > 1:
        members.append(Units(run, strategy.sharding))
    trainer = Trainer(run, task, state, saver, [*members, stop])  # last: it may end the group
    return _Parts(strategy, trainer, stop, metrics, recorder, spread, callbacks, profiler, begin)


def _place_model(
    run: Run, source: Source, spread: Spread, strategy: Strategy, loss: losses.Loss
) -> tuple[Start, dict[str, float]]:
    """Build the model and spread it; return its start, and factors of samples per second."""
    config, world = run.config, run.world
    begin = start(run, models.maker(config, source, world.device))
    model = begin.model
    if not (loss.takes_model or loss.turns) and type(model).forward is torch.nn.Module.forward:
        raise ConfigError(f"model.name={config.model.name}: the class has no method forward")
    crosscheck.check(world, config, model)
    example = spread.example
    rows = len(strategy.rows(config.data.global_batch))
    size = config.data.micro_batch
    passes = strategy.data_ranks * -(-rows // (size if isinstance(size, int) else rows))
    factors, missing = flops.factors(run, model, example, loss, passes)
    spread.compute_plain(model, begin.whole)
    draws = spread.is_due or not begin.resumes
    strategy.place(model, example, partial(begin.fill, draws=draws))
    if not loss.takes_model:
        check_arguments(model, example)
    roots = {"model": strategy.model, "loss": loss.function}
    if loss.is_own and not loss.takes_model:
        # All ranks learn whether it returns weights; a pipeline's would not.
        example = example.to(world.device)
        with left_alone(roots):
            loss(strategy.forward(example), example.targets)
    strategy.warm_up(example)
    spread.compare()
    if config.data.pack:
        example = spread.example.to(world.device)
        with left_alone(roots):
            packing.refuse_leaks(strategy.forward, strategy.model, source.form, example)
    drop_gathered(strategy.model)  # of a forward pass without a backward pass
    if config.train.compile:
        models.compile_blocks(strategy.model)
    batch, is_cut = config.data.global_batch, config.data.micro_batch is not None
    run.warn(models.batchnorm.warning(strategy.model, strategy.data_ranks, batch, is_cut))
    run.warn(missing)  # only here: a refusal stands alone
    return begin, factors


def _named(recipe: str, config: Config, world: World) -> Run:
    name = world.broadcast_text(config.run.name or default_name(recipe))
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    config = arguments.complete(config, arguments.inspected)
    run_dir = RunDir(config.run.root, name)
    is_closed = world.is_main and run_dir.path.exists() and not os.access(run_dir.path, os.R_OK)
    problem = f"{run_dir.path}: the run directory cannot be used: it cannot be read"
    world.raise_together(problem if is_closed else "")  # before anything of it is looked for
    return Run(config, world, run_dir)


def _open(run: Run) -> None:
    config, world, run_dir = run.config, run.world, run.run_dir
    launcher = world.place.launcher
    problem, fenced = "", None
    if world.is_main:
        try:
            run_dir.create()
            if run_dir.checkpoints.exists():
                next(run_dir.checkpoints.iterdir(), None)  # refused, rather than started again
            run.claim_directory()
            run_dir.check_claim()  # it may have stood still
            run_dir.forget_verdict()
            chip = chip_name(world.device)
            run.record("started", world_size=world.world_size, launcher=launcher, chip=chip)
        except FencedError as error:
            fenced = error
        except OSError as error:
            place = error.filename or run_dir.path
            problem = f"{place}: the run directory cannot be used: {error.strerror}; run.root "
            problem += "chooses another"
    if world.has_any(fenced is not None):
        raise fenced or FencedError("")  # which rank 0 says
    world.raise_together(problem)
    # As supervisors do, keep what the ranks print, so that `rollcall logs` can show it.
    attempt = int(world.broadcast_text(str(run_dir.next_attempt()) if world.is_main else ""))
    if run_dir.attempt_of(1) is None:
        node = world.rank // world.place.local_world_size
        keep_output(run_dir.log(attempt, node, world.rank))
    ranks = counted(world.world_size, "rank")
    run.say(
        f"rollcall: {ranks} ({launcher}), {world.device.type}, "
        f"{config.parallel.mesh or config.parallel.strategy}; run directory {run_dir.path}"
    )


def _conclude(run: Run, parts: _Parts, state: State, weights: str, seconds: float) -> None:
    """Write the verdict and print the summary; `weights` is their hash in exact mode, or empty."""
    trainer = parts.trainer
    asked, early = trainer.task.order.steps, trainer.task.patience.reason
    step = run.progress.step
    trained = f"{counted(step, 'step')} trained"
    done, is_new = trained, step != parts.metrics.first
    if step > asked:
        done = f"{trained}; this run was already past the {asked} that were asked for"
    elif not is_new:
        done = f"nothing to do: {trained} already"
    reason = {
        "done": f"{done}; stopped early: {early}" if early else done,
        "stopped": "a person asked to stop",
        "requeue": parts.stop.reason,
        "failed": trained,
    }[state]
    if state == "requeue" and not parts.stop.is_queued_again:
        state = "stopped"
    if trainer.saver.problem:
        reason += f"; {trainer.saver.problem}"
    hashed = {"weights": weights} if weights else {}
    run.record("finished", step=step, state=state, **hashed)
    problem = run.run_dir.try_to_conclude(Verdict(state, step, reason))
    # Rank 0 does not know if the job is queued again: it may have been cancelled.
    shown = "saved" if state == "requeue" else state
    total = step if state == "done" else max(step, asked)  # it may have stopped early
    rows = {"result": f"{shown}: {reason}", "step": f"{step} of {total}"}
    rows |= trainer.task.summary()
    if weights:
        rows["weights"] = f"{weights[:16]} (sha256)"
    rows |= trainer.saver.summary() | trainer.steps.recovery.summary()
    if is_new:
        rows |= parts.metrics.summary()
    rows["time"] = f"{seconds:.1f} s"
    rows["run directory"] = str(run.run_dir.path)
    if problem:
        rows["verdict"] = problem
    if state != "done":
        rows["to continue"] = f"the same command with run.name={run.run_dir.name}"
    parts.metrics.show_summary(rows)
