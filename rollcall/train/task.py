"""The data of a run: the batches to train on, and the evaluation."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollcall.config.schema import ConfigError
from rollcall.records.run import LoggedStep, Validation
from rollcall.system.files import Journal
from rollcall.train.checkpoint.scores import ranked
from rollcall.train.data import identity
from rollcall.train.data.loading import Loading
from rollcall.train.data.order import Order, training_batches
from rollcall.train.data.source import Batch, Source
from rollcall.train.data.stream import Stream, StreamPosition
from rollcall.train.evaluate import Figures, evaluate, in_words, shown
from rollcall.train.numerics import metrics
from rollcall.train.numerics.losses import NOTHING
from rollcall.train.numerics.randomness import next_numbers, set_seed
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.agreement import Action, Step
from rollcall.train.ranks.run import Run
from rollcall.train.ranks.stop import Stop
from rollcall.train.recovery import memory

QUIET = ("top5", "perplexity")
"""Figures that the summary leaves out."""
VAIN = 10
"""Steps without any target that counts, after which a run is refused."""
MOST_REPEATS = 20  # of all training data in a batch: more may be a mistake, and fill the memory
OnLogged = Callable[[int, Mapping[str, Any]], None]
"""Called with the step and the values of a line of metrics.jsonl."""


class Patience:
    """Counts evaluations without an improvement; all ranks make each call together."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._most = run.config.train.stop_after
        self._name, self._sign = ranked(run.config.train.stop_metric)
        self._scores: dict[int, float] = {}  # by step; more is better

    @property
    def reason(self) -> str:
        """The reason to stop the run early, or an empty text."""
        scores = [self._scores[step] for step in sorted(self._scores)]
        since = len(scores) - 1 - scores.index(max(scores)) if scores else 0
        is_over = self._most is not None and scores and since >= self._most
        return f"{self._name} has not improved in {since} evaluations" if is_over else ""

    def recall(self, step: int) -> None:
        """Read the evaluations up to this step, which earlier attempts recorded."""
        world, found = self._run.world, {}
        if self._most and world.is_main:
            for event in self._run.run_dir.read_events("evaluated"):
                value = event.get(self._name)
                if isinstance(value, int | float) and event.get("step", math.inf) <= step:
                    found[event["step"]] = self._score(value)
        self._scores = dict(world.broadcast([*found.items()]))

    def add(self, step: int, figures: dict[str, float]) -> None:
        """Note an evaluation; raise ConfigError if it has no metric that the run watches."""
        train, best = self._run.config.train, self._run.config.checkpoint.keep_best
        stop = self._most and train.stop_metric
        watched = {"train.stop_metric": stop, "checkpoint.keep_best": best}
        for key, metric in watched.items():
            if metric and ranked(metric)[0] not in figures:
                known = ", ".join(figures)
                raise ConfigError(f"{key}={metric}: the evaluation has no such figure, but {known}")
        if self._most:
            self._scores[step] = self._score(figures[self._name])

    def _score(self, value: float) -> float:
        return -math.inf if math.isnan(value) else self._sign * value  # NaN is the worst


@dataclass(frozen=True)
class Samples:
    """Sums over the ranks about the samples of a step."""

    unreadable: float  # in the current epoch; infinite after an error that ends reading


class Task:
    """Gives this rank its rows of each batch, evaluates, and ends runs that cannot learn."""

    def __init__(
        self,
        run: Run,
        source: Source,
        strategy: Strategy,
        stop: Stop,
        on_logged: OnLogged = lambda *_: None,  # called with each line that rank 0 logs
    ) -> None:
        self._run, self._on_logged = run, on_logged
        self._source, self._strategy = source, strategy
        self._loss, self.turn_of = strategy.loss, strategy.loss.turn_of
        self._metrics = metrics.build(run.config.train, not strategy.loss.takes_model)
        self.patience = Patience(run)
        self.is_over = False  # whether training stops early
        self._journal = Journal(run.run_dir.metrics)
        self._stop = stop  # ends an evaluation early
        self.order = Order.of_run(run.config, source)
        batch, size = self.order.global_batch, self.order.size
        if batch > MOST_REPEATS * size:
            text = f"a step takes each of the {size:,} training samples {batch // size} times"
            run.warn(f"data.global_batch={batch}: {text}; choose at most {size}")
        run.progress.steps = self.order.steps
        self.identity: dict[str, Any] = {}  # facts by which the data is recognized
        self.result: Figures | None = None  # of the newest evaluation
        self._first = 0  # updates done when this attempt began
        self.unreadable = 0  # samples of the current epoch that no rank could read
        self.restart()

    def restart(self) -> None:
        """Read and count the samples again, as after a rollback."""
        config, world = self._run.config, self._run.world
        self._loading = Loading(config.data, config.seed, world.rank, world.device)

    def identify(self, resumes: bool) -> None:
        """Raise ConfigError if the data differs from other ranks', or from earlier attempts'."""
        self.identity = identity.check(self._run, self._source, resumes)

    def example(self, rows: int = 2, source: Source | None = None) -> Batch:
        """Return a batch, of two samples because a model with BatchNorm does not train on one."""
        data = self._run.config.data.model_copy(update={"num_workers": 0})
        loading = Loading(data, self._run.config.seed)
        source = source or self._source
        return next(training_batches(source, self.order, range(rows), range(1), loading))

    def draws_by_rank(self) -> str:
        """Return a warning if the collate function draws, which it does for the rows of a rank."""
        form, drawn = self._source.form, list[bool]()
        if (collate := form.collate) is None:
            return ""

        @functools.wraps(collate)
        def watched(samples: list[Any]) -> Any:
            before = next_numbers()
            batch = collate(samples)
            drawn.append(next_numbers() != before)
            return batch

        self.example(source=replace(self._source, form=replace(form, collate=watched)))
        if not any(drawn):
            return ""
        name = self._run.config.data.collate or getattr(collate, "__name__", "")
        return (
            f"data.collate={name} draws random numbers for the rows of a rank, so the result "
            "depends on the number of ranks; draw them in the data set"
        )

    def batches(self, first: int) -> Iterator[Batch]:
        """Yield this rank's rows of every batch, from the update `first` (from 0) to the last."""
        rows = self._strategy.rows(self.order.global_batch)
        steps = range(first, self.order.steps)
        return training_batches(self._source, self.order, rows, steps, self._loading)

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics that the configuration names, by their keys."""
        return {f"train.metrics.{name}": metric.function for name, metric in self._metrics.items()}

    @property
    def all_count(self) -> bool:
        """True if all targets of all samples count, so that ranks need not count them."""
        promised = getattr(self._source.train, "all_count", False)
        return promised and not self._run.config.data.skip_unreadable

    def report(self) -> Samples:
        """Return this rank's share of what could not be read."""
        # Parts of one replica read the same samples.
        alike = self._run.world.world_size / self._strategy.data_ranks
        return Samples(self._loading.unreadable / alike)

    def settle(self, step: Step, agreed: Samples) -> Action:
        """Raise ConfigError if too much is unreadable, or no target of VAIN steps counts."""
        self._loading.refuse(self._run.world, agreed.unreadable)
        self.unreadable = round(agreed.unreadable)
        steps = min(VAIN, self.order.steps - self._first)
        if not step.has_counted and self._first < VAIN and step.number >= self._first + steps:
            problem = f"no target of the first {steps} steps counts: {NOTHING}"
            raise ConfigError(f"data.name={self._run.config.data.name}: {problem}")
        return Action.CONTINUE

    def is_evaluation_due(self, step: int) -> bool:
        """Return True if an evaluation is due after `step` updates, other than the final one."""
        epochs = self._run.config.train.evaluate_every
        if not epochs or step >= self.order.steps:
            return False
        interval = max(1, round(epochs * self.order.size / self.order.global_batch))
        return step % interval == 0

    def lacks_evaluation(self, step: int) -> bool:
        """Return True if an evaluation after `step` was cut off; all ranks call it together."""
        if not step or not self.is_evaluation_due(step):
            return False
        newest = Validation.newest(self._run.run_dir.path)
        return bool(self._run.world.broadcast(newest is None or newest.step < step))

    def evaluate(self, step: int, micro_batch: int | None = None) -> Figures | Action:
        """Evaluate and report, or return STOP or REQUEUE; raise MemoryError if memory runs out."""
        run = self._run
        what = self._strategy, self._source, run.config
        began = time.perf_counter()
        try:
            result = evaluate(*what, self._stop.is_asked, self._metrics, micro_batch)
        except (MemoryError, RuntimeError) as error:
            if memory.is_exhausted(error):
                rows = micro_batch or len(self._strategy.rows(self.order.global_batch))
                memory.give_up(run, f"{error}, while evaluating", max(1, rows // 2))
            raise
        if result is None:
            return self._stop.agree()
        if not result:
            return result
        self.patience.add(step, result)
        self.is_over = bool(self.patience.reason)
        self.result = result
        run.say(f"step {step}/{max(step, self.order.steps)}  validation {in_words(result)}")
        seconds = round(time.perf_counter() - began, 4)
        run.record("evaluated", step=step, seconds=seconds, **result)
        self._draw(step)
        if run.world.is_main:
            values = {f"val_{name}": value for name, value in result.items()}
            line = Validation.parse({"step": step, "time": time.time(), **values})
            assert line is not None, "the figures have a loss"
            path = run.run_dir.path
            before = Validation.newest(path)
            if before and before.step == step:  # the run had ended, and was started again
                with contextlib.suppress(OSError):
                    LoggedStep.forget_validation(path, step)
            self.log(line)
        return result

    def log(self, line: LoggedStep | Validation) -> None:
        """Append a line to metrics.jsonl, and pass it on to the user's loggers; rank 0 calls it."""
        values = line.as_dict()
        self._journal.append(values)
        self._on_logged(line.step, values)

    def _draw(self, step: int) -> None:
        """Keep a grid of the images that `samples(model)` of the loss returns, if it has that."""
        draw, world = getattr(self._loss.function, "samples", None), self._run.world
        if not self._loss.takes_model or draw is None:
            return
        set_seed(self._run.config.seed, "samples")  # the same noise every time
        images = self._strategy.samples(draw)
        shape = tuple(getattr(images, "shape", ()))
        if len(shape) != 4 or shape[1] not in (1, 3):
            raise ConfigError(
                f"train.loss={self._loss.name}: expected a tensor of images (n, 1 or 3, height, "
                f"width) of its samples(model), got {shape or type(images).__name__}"
            )
        if world.is_main:
            from torchvision import io, utils  # here, because it takes long

            rows = math.ceil(math.sqrt(len(images)))
            grid = utils.make_grid(images.detach().float().cpu().clamp(0, 1), nrow=rows)
            picture = io.encode_png((grid * 255).round().byte()).numpy().tobytes()
            with contextlib.suppress(OSError):  # training is more important
                self._run.run_dir.add_samples(step, picture)

    def epochs(self, step: int) -> float:
        """Return how often the training data was seen after `step` updates."""
        return round(self.order.position(step) / self.order.size, 3)

    def facts(self, step: int) -> dict[str, Any]:
        """Return the facts about the data for a checkpoint of this step."""
        position = self._loading.positions.get(step)
        stream = {"stream": list(position)} if position else {}
        return {"data": self.identity, **self.order.facts(step), **stream}

    def continue_from(self, step: int, facts: Mapping[str, Any]) -> None:
        """Continue where a checkpoint with these facts was saved."""
        self.order.continue_from(step, facts)
        self._run.progress.steps = self.order.steps
        self.patience.recall(step)
        self.is_over = bool(self.patience.reason)
        self._first = step
        if isinstance(self._source.train, Stream) and "stream" in facts:
            self._source.train.continue_at(StreamPosition(*facts["stream"]))

    def summary(self) -> dict[str, str]:
        """Return rows for the summary of the run."""
        figures = self.result or {}
        names = [name for name in figures if name.rpartition("/")[2] not in QUIET]
        names.sort(key=lambda name: name != "accuracy")  # the first row, as people want it
        return {f"validation {name}": shown(name, figures[name]) for name in names}
