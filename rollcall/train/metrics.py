"""Show the progress of a run: lines of metrics.jsonl, and a progress bar or plain lines."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from rollcall.messages.text import fixed
from rollcall.records.run import LoggedStep
from rollcall.train.numerics import schedules
from rollcall.train.ranks.agreement import Action, Number, Step
from rollcall.train.ranks.clock import DATA, clock
from rollcall.train.ranks.run import Run
from rollcall.train.task import Task


@dataclass(frozen=True)
class Measured:
    """Sums over the ranks for the lines of metrics.jsonl."""

    waited: float  # seconds for which data was waited for, this rank's share of the mean
    new_names: float  # ranks that have measured something that the others do not know
    numbers: list[Number]  # of `Measures`


class Metrics:
    """The member of the step that logs what all ranks agreed on; only rank 0 writes."""

    def __init__(
        self,
        run: Run,
        task: Task,
        factors: Mapping[str, float],  # by what to multiply samples per second for further figures
        fields: Callable[[], Mapping[str, Any]],  # returns further fields of a line
    ) -> None:
        self._run, self._task = run, task
        self._factors, self._fields = factors, fields
        self._rate_of = schedules.Schedule(run.config)
        self.wants_every_step = bool(task.turn_of(1))
        self._of_turns: dict[str, list[float]] = {}  # losses by network since the newest line
        self.first = self._newest = 0  # updates done before this attempt, and by now
        self._window_samples = self._samples = 0
        self._waited = 0.0  # seconds in which this rank waited for data
        self._window_waited = self._rate = self._reported = 0.0
        self._window_start = self._start = time.perf_counter()
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bar = _bar(self._console) if self._console.is_terminal else None
        self._task_id = TaskID(0)

    @contextmanager
    def shown(self, first: int) -> Iterator[None]:
        """Show progress while the context is open; `first` updates are done already."""
        if not self._run.world.is_main:
            yield
            return
        self.first = self._newest = first
        self._window_start = self._start = time.perf_counter()
        LoggedStep.forget_after(self._run.run_dir.path, first)
        if self._bar:
            counts: dict[str, Any] = {"total": self._last, "completed": first}
            self._task_id = self._bar.add_task("train", **counts, loss="", rate=0.0)
        with self._bar or nullcontext():
            yield

    def report(self) -> Measured:
        """Note when the update ended, since data was waited for until then."""
        self._reported = time.perf_counter()
        world, measures = self._run.world, self._run.measures
        before, self._waited = self._waited, clock.totals()[1][DATA]
        waited = (self._waited - before) / world.world_size
        return Measured(waited, measures.has_new, measures.take(world))

    def settle(self, step: Step, agreed: Measured) -> Action:
        """Count the steps, and log the newest if it is due."""
        measures = self._run.measures
        measures.settle(agreed.numbers, self._run.world)
        if agreed.new_names:
            measures.agree(self._run.world)
        if not self._run.world.is_main:
            return Action.CONTINUE
        number, order = step.number, self._task.order
        samples = (step.steps - 1) * order.global_batch
        samples += 0 if step.is_skipped else order.count(number - 1)
        self._samples += samples
        self._window_samples += samples
        if not step.is_skipped:
            if number <= self._newest:  # after a rollback
                LoggedStep.forget_after(self._run.run_dir.path, number - 1)
            self._newest = number
            self._window_waited += agreed.waited
            if turn := self._task.turn_of(number):
                self._of_turns.setdefault(f"loss_{turn}", []).append(step.loss)
            if self._bar:
                self._bar.update(
                    self._task_id, completed=number, loss=fixed(step.loss), rate=self._rate
                )
            if number % self._run.config.log.every == 0 or number in (self.first + 1, self._last):
                self._log(step)
        return Action.CONTINUE

    @property
    def _last(self) -> int:
        return self._task.order.steps

    def show_summary(self, rows: Mapping[str, str]) -> None:
        """Print the table at the end of a run."""
        table = Table(show_header=False)
        for name, value in rows.items():
            table.add_row(name, value)
        self._console.print(table)

    def summary(self) -> dict[str, str]:
        """Return rows for the summary of the run."""
        seconds = self._reported - self._start  # without the validation at the end
        return {"speed": f"{self._samples / seconds:,.0f} samples/s"}

    def _log(self, step: Step) -> None:
        seconds = self._reported - self._window_start
        self._rate = self._window_samples / seconds
        waited = self._window_waited / seconds
        self._window_start, self._window_samples, self._window_waited = self._reported, 0, 0.0
        of_turns = {name: sum(losses) / len(losses) for name, losses in self._of_turns.items()}
        self._of_turns.clear()
        measured, unreadable = of_turns | self._run.measures.line(), self._task.unreadable
        line = LoggedStep(
            step=step.number,
            loss=step.loss,
            samples_per_second=round(self._rate, 1),
            time=time.time(),
            data_wait=round(waited, 4),
            more={
                **{name: round(self._rate * by, 4) for name, by in self._factors.items()},
                "epoch": self._task.epochs(step.number),
                "lr": self._rate_of(step.number - 1, self._last),
                "grad_norm": step.grad_norm,
                **({"unreadable": unreadable} if unreadable else {}),
                **self._fields(),
                **measured,
            },
        )
        self._task.log(line)
        # Numbers of layers, such as expert_imbalance/block0, are in the report.
        shown = {k: v for k, v in measured.items() if k.partition("/")[0] not in {*measured} - {k}}
        figures = "".join(f"  {name} {value:.4g}" for name, value in shown.items())
        if not self._bar:
            per_step = (time.perf_counter() - self._start) / max(1, step.number - self.first)
            left = timedelta(seconds=round(min(1e13, per_step * (self._last - step.number))))
            self._run.say(
                f"step {step.number}/{self._last}  loss {fixed(step.loss)}{figures}  "
                f"{self._rate:,.0f} samples/s  {left} left"
            )
        elif figures:
            self._run.say(f"step {step.number}{figures}")


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[rate]:,.0f} samples/s"),
        TimeRemainingColumn(),
        console=console,
    )
