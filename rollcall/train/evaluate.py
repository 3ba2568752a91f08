"""Evaluate the model on the validation set; every target that counts does so once."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from rollcall.config import Config, ConfigError
from rollcall.messages.text import fixed
from rollcall.train.data.loading import Loading
from rollcall.train.data.order import validation_batches
from rollcall.train.data.source import Batch, Source
from rollcall.train.numerics.losses import NOTHING, are_scores, valid_share
from rollcall.train.numerics.metrics import Metric
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.activity import doing

ROWS = 256
"""Samples on a rank after which all ranks agree to continue."""
MANY_CLASSES = 20
"""From this number of classes on, top-5 accuracy is reported too."""
Terms = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""For each figure its sums and weights: (rows,), or (rows, n) for a metric of several counts."""


Figures = dict[str, float]
"""Figures over the whole validation data; for further sets, the names are set/figure."""


def in_words(figures: Figures) -> str:
    """Return figures for people, on one line."""
    return "  ".join(f"{name} {shown(name, value)}" for name, value in figures.items())


def shown(name: str, value: float) -> str:
    """Return a figure for people: shares as per cent."""
    kind = name.rpartition("/")[2]
    if kind in ("accuracy", "top5"):
        return f"{value:.2%}"
    return f"{value:.2f}" if kind == "perplexity" else fixed(value)


@doing("evaluating", may_take_long=True)
def evaluate(
    strategy: Strategy,
    source: Source,
    config: Config,
    is_asked_to_stop: Callable[[], bool] = bool,  # asked after every batch
    metrics: Mapping[str, Metric] | None = None,
    micro_batch: int | None = None,
) -> Figures | None:
    """Evaluate on all ranks together, with one result; None if a rank was asked to stop.

    A forward pass takes at most `micro_batch` samples, or this rank's rows of a batch, as a step.
    Raise ConfigError if no target counts, or more than `data.skip_unreadable` could not be read.
    """
    rows = len(strategy.rows(config.data.global_batch)) // len(strategy.shares[0])
    size = min(micro_batch or rows, rows)
    figures: Figures = {}
    for name in source.validations:
        part = _Set(strategy, source, config, metrics or {}, name, size)
        if (totals := part.totals(is_asked_to_stop)) is None:
            return None
        values = part.of(totals).items()
        figures |= {f"{name}/{key}" if name else key: value for key, value in values}
    return figures


@dataclass
class _Set:
    _strategy: Strategy
    _source: Source
    _config: Config
    _metrics: Mapping[str, Metric]
    _name: str
    _size: int  # samples of a pass
    _sizes: dict[str, tuple[int, int]] = field(default_factory=dict)  # of each: sums and weights
    _is_sequence: bool = False

    def totals(self, is_asked_to_stop: Callable[[], bool]) -> list[float] | None:
        """Return the sums of all figures over all ranks; None if a rank was asked to stop."""
        strategy, world, config = self._strategy, self._strategy.world, self._config
        own, shares = strategy.shares
        loading = Loading(config.data, config.seed, world.rank, world.device)
        terms = []
        for share in own:
            total: torch.Tensor | None = None
            what = self._source, self._size, share, shares, loading, self._name
            for number, batch in enumerate(validation_batches(*what)):
                is_due = number % math.ceil(ROWS / self._size) == 0
                if is_due and world.has_any(is_asked_to_stop()):
                    return None
                batch = batch.to(world.device)
                sums = self._sums(self._terms(batch), batch.weights)
                total = sums if total is None else total + sums
            assert total is not None, "a validation set has samples"
            unreadable = loading.unreadable if share == own[-1] else 0  # it counts on
            terms.append(torch.cat([total, torch.tensor([unreadable], dtype=torch.float64)]))
        *totals, unreadable = strategy.add(terms).tolist()
        loading.refuse(world, unreadable)
        return totals

    def of(self, totals: list[float]) -> dict[str, float]:
        """Return the figures of these sums."""
        found: dict[str, float] = {}
        rest = iter(totals)
        for name, columns in self._sizes.items():
            sums = list(islice(rest, columns[0]))
            weight, *_ = islice(rest, columns[1])
            if name in self._metrics:
                more = self._metrics[name].figures(name, sums, weight)
                if twice := more.keys() & found:
                    raise ConfigError(
                        f"train.metrics.{name}: another figure is called {min(twice)} too; give "
                        "the metric another name"
                    )
                found.update(more)
            elif not weight:
                raise ConfigError(
                    f"data.name={self._config.data.name}: no target of the validation data counts"
                    f"{self._name and f' ({self._name})'}: {NOTHING}"
                )
            else:
                found[name] = sums[0] / weight
        if self._is_sequence:
            found["perplexity"] = math.exp(min(found["loss"], 700))
        return found

    @torch.no_grad()  # a loss may have weights
    def _terms(self, batch: Batch) -> Terms:
        loss = self._strategy.loss
        if loss.takes_model:
            sums = self._strategy.sums(batch)
            rows = torch.zeros_like(batch.weights)
            rows[batch.weights.argmax()] = 1  # a row that counts, if there is one
            pair = sums.losses * sums.counts, sums.weights * sums.counts
            pairs = {"loss": pair, **sums.figures}.items()
            return {name: (one * rows, weight * rows) for name, (one, weight) in pairs}
        # Only metrics of the user's and top-5 accuracy need all scores at once.
        is_short = not self._metrics and getattr(batch.targets, "ndim", 1) > 1
        scores = self._strategy.scores(batch) if is_short else None
        outputs, hits = scores or (self._strategy.forward(batch), None)
        terms = {"loss": loss(outputs, batch.targets)}
        outputs, targets = loss.aligned(outputs, batch.targets)
        terms |= self._shares(outputs, targets, hits)
        for name, metric in self._metrics.items():
            terms[name] = metric.terms(outputs, targets, len(batch.weights))
        return terms

    def _shares(self, outputs: Any, targets: Any, hits: torch.Tensor | None) -> Terms:
        """Return the share of right answers, if the targets are classes."""
        if hits is None and not are_scores(outputs, targets):
            return {}
        self._is_sequence = targets.ndim > 1
        counted = valid_share(targets) * targets[:1].numel()
        if hits is not None:
            return {"accuracy": (hits.flatten(1).sum(1), counted)}
        found = {"accuracy": (_hits(outputs, targets, 1), counted)}
        if outputs.shape[-1] >= MANY_CLASSES and not self._is_sequence:
            found["top5"] = _hits(outputs, targets, 5), counted
        return found

    def _sums(self, terms: Terms, weights: torch.Tensor) -> torch.Tensor:
        """Sum the terms over the rows that count, all after each other."""
        parts = []
        for name, pair in terms.items():
            columns = [one.view(len(weights), -1).double() for one in pair]
            self._sizes[name] = columns[0].shape[1], columns[1].shape[1]
            parts += [(weights.double() @ column).cpu() for column in columns]
        return torch.cat(parts)


def _hits(outputs: torch.Tensor, targets: torch.Tensor, best: int) -> torch.Tensor:
    """Return how many of each sample's targets are among its `best` best answers: (rows,)."""
    found = (outputs.topk(best).indices == targets.unsqueeze(-1)).any(-1)
    return found.float().view(len(found), -1).sum(1)
