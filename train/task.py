"""The data of a run: the batches to train on, and the evaluation."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rollcall.config.schema import ConfigError
from rollcall.records.files import Journal
from rollcall.records.run import LoggedStep, Validation
from rollcall.train.data import identity
from rollcall.train.data.loading import Loading
from rollcall.train.data.order import Order, training_batches
from rollcall.train.data.source import Batch, InMemory, Source
from rollcall.train.data.stream import Place, Stream
from rollcall.train.dist.agreement import Action
from rollcall.train.dist.run import Run
from rollcall.train.dist.stop import Stop
from rollcall.train.evaluate import Evaluation, evaluate, shown
from rollcall.train.numerics import metrics
from rollcall.train.numerics.losses import NOTHING, Loss
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.patience import Patience

QUIET = ("top5", "perplexity")
"""Figures that the summary leaves out."""
VAIN = 10
"""Steps without any target that counts, after which a run is refused."""


class Task:
    """Gives this rank its rows of every batch, and evaluates the model.

    As a member of the step it reports the time spent waiting for data, unreadable samples, and how
    many targets of the next batch do not count.
    """

    def __init__(
        self, run: Run, source: Source, strategy: Strategy, loss: Loss, stop: Stop
    ) -> None:
        self._run = run
        self._source = source
        self._strategy = strategy
        self._loss = loss
        self._metrics = metrics.build(run.config.train, not loss.takes_model)
        self.patience = Patience(run)
        self._journal = Journal(run.run_dir.metrics)
        self._stop = stop  # ends an evaluation early
        self.order = Order.of_run(run.config, source)
        self.identity: dict[str, Any] = {}  # facts by which the data is recognized
        self.on_logged: Callable[[int, Mapping[str, Any]], None] = lambda *_: None  # on rank 0
        self.result: Evaluation | None = None  # of the newest evaluation
        self.restart()

    def restart(self) -> None:
        """Read and count the samples again, as after a rollback."""
        config, world = self._run.config, self._run.world
        self._loading = Loading(config.data, config.seed, world.rank, world.device)
        # Targets of the batch that was yielded that do not count, and of the next one.
        self.missing = self._missing = 0.0
        self._vain: float = 0  # steps so far, as long as no target has counted

    def identify(self, resumes: bool) -> None:
        """Raise ConfigError if the data differs from other ranks', or from earlier attempts'."""
        self.identity = identity.check(self._run, self._source, resumes)

    def example(self, rows: int = 2) -> Batch:
        """Return a batch, of two samples because a model with BatchNorm does not train on one."""
        loading = Loading(
            self._run.config.data.model_copy(update={"num_workers": 0}), self._run.config.seed
        )
        return next(training_batches(self._source, self.order, range(rows), range(1), loading))

    def batches(self, first: int) -> Iterator[Batch]:
        """Yield this rank's rows of every batch, from the update `first` (from 0) to the last."""
        rows = self._strategy.rows(self.order.global_batch)
        steps = range(first, self.order.steps)
        all_count = isinstance(self._source.train, InMemory) and self._source.train.all_count
        batches = training_batches(self._source, self.order, rows, steps, self._loading)
        for step, batch in enumerate(batches, first):
            ahead, self.missing, self._missing = self._loading.ahead, self._missing, 0.0
            if ahead is not None and not all_count:
                samples = self.order.count_of(step + 1, rows)
                self._missing = self._loss.missing(ahead.targets, ahead.weights, samples)
            yield batch

    def report(self) -> Mapping[str, float]:
        """Return this rank's share of `waited`, mean seconds, `unreadable`, samples, and `missing`.

        `missing` is the number of targets of the next batch that do not count.
        """
        ranks = self._run.world.world_size
        alike = ranks / self._strategy.data_ranks  # parts of one replica read the same samples
        return {
            "waited": self._loading.take_waited() / ranks,
            "unreadable": self._loading.unreadable / alike,
            "missing": self._missing / alike,
        }

    def settle(self, _step: int, agreed: Mapping[str, Any]) -> Action:
        """Count steps without a target that counts.

        Raises:
            ConfigError: more than `data.skip_unreadable` samples could not be read, or no target
                of the first VAIN steps has counted.
        """
        self._loading.refuse(self._run.world, agreed["unreadable"])
        self._vain = math.inf if agreed["count"] else self._vain + 1
        if self._vain == min(VAIN, self.order.steps):
            raise ConfigError(
                f"data.name={self._run.config.data.name}: no target of the first {self._vain} "
                f"steps counts: {NOTHING}"
            )
        return Action.CONTINUE

    @property
    def must_exchange(self) -> bool:
        """Whether ranks must add up numbers after this step, because no target has counted yet."""
        return 0 < self._vain < math.inf

    def is_evaluation_due(self, step: int) -> bool:
        """Return whether to evaluate after `step` updates; the end of the run does not count."""
        epochs = self._run.config.train.evaluate_every
        if not epochs or step >= self.order.steps:
            return False
        interval = max(1, round(epochs * self.order.size / self.order.global_batch))
        return step % interval == 0

    def evaluate(self, step: int) -> Evaluation | Action:
        """Evaluate and report the result; STOP or REQUEUE if a rank was asked to stop before."""
        run = self._run
        what = self._strategy, self._source, run.world, run.config, self._loss
        began = time.perf_counter()
        result = evaluate(*what, self._stop.is_asked, self._metrics)
        if result is None:
            return self._stop.agree()
        if not result.values:
            return result
        self.patience.add(step, result.values)
        self.result = result
        run.say(f"step {step}/{max(step, self.order.steps)}  validation {result}")
        seconds = round(time.perf_counter() - began, 4)
        run.record("evaluated", step=step, seconds=seconds, **result.values)
        if run.world.is_main:
            values = {f"val_{name}": value for name, value in result.values.items()}
            line = Validation.parse({"step": step, "time": time.time(), **values})
            assert line is not None, "the figures have a loss"
            path = run.run_dir.path
            before = Validation.newest(path)
            if before and before.step == step:  # the run had ended, and was started again
                with contextlib.suppress(OSError):
                    LoggedStep.forget_validation(path, step)
            self._journal.append(line.as_dict())
            self.on_logged(step, values)
        return result

    def epochs(self, step: int) -> float:
        """Return how often the training data was seen after `step` updates."""
        return round(self.order.position(step) / self.order.size, 3)

    def facts(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint of this step says about the data."""
        place = self._loading.places.get(step)
        stream = {"stream": list(place)} if place else {}
        return {"data": self.identity, **self.order.facts(step), **stream}

    def continue_from(self, step: int, facts: Mapping[str, Any]) -> None:
        """Continue where a checkpoint with these facts was saved."""
        self.order.continue_from(step, facts)
        self.patience.recall(step)
        self._vain = math.inf if step >= VAIN else 0  # such a checkpoint has learned from a target
        if isinstance(self._source.train, Stream) and "stream" in facts:
            self._source.train.continue_at(Place(*facts["stream"]))

    def summary(self) -> dict[str, str]:
        """Return rows for the summary of the run."""
        if self.result is None:
            return {}
        figures = self.result.values
        first = ["accuracy"] if "accuracy" in figures else []  # the first row, as people want it
        names = [
            *first,
            *(one for one in figures if one not in first and one.rpartition("/")[2] not in QUIET),
        ]
        return {f"validation {name}": shown(name, figures[name]) for name in names}
