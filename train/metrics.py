"""Show the progress of a run: lines of metrics.jsonl, and a progress bar or plain lines."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from rollcall.records.files import Journal
from rollcall.records.run import LoggedStep
from rollcall.train.dist.agreement import Action
from rollcall.train.dist.run import Run
from rollcall.train.numerics import optim
from rollcall.train.task import Task


class Metrics:
    """The member of the step that logs what all ranks agreed on; only rank 0 writes.

    Losses are means over all targets of the global batch that count.
    """

    def __init__(
        self,
        run: Run,
        task: Task,
        factors: Mapping[str, float],  # by what to multiply samples per second for further figures
        fields: Callable[[], Mapping[str, Any]],  # returns further fields of a line
        on_logged: Callable[[int, Mapping[str, Any]], None] = lambda *_: None,  # called with each
    ) -> None:
        self._run = run
        self._task = task
        self._factors = factors
        self._rate_of = optim.Schedule(run.config)
        self._fields = fields
        self._on_logged = on_logged
        self._journal = Journal(run.run_dir.metrics)
        self._first = 0
        self._newest = 0
        self._reported = 0.0
        self._window_samples = self._samples = 0
        self._window_waited = self._rate = 0.0
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
        self._first = self._newest = first
        self._window_start = self._start = time.perf_counter()
        LoggedStep.forget_after(self._run.run_dir.path, first)
        if self._bar:
            self._task_id = self._bar.add_task(
                "train", total=self._last, completed=first, loss=0.0, rate=0.0
            )
        with self._bar or nullcontext():
            yield

    def report(self) -> Mapping[str, float]:
        """Return nothing; note when the update ended, since data was waited for until then."""
        self._reported = time.perf_counter()
        return {}

    def settle(self, step: int, agreed: Mapping[str, Any]) -> Action:
        """Count the steps, and log the newest if it is due."""
        if not self._run.world.is_main:
            return Action.CONTINUE
        samples = (agreed["steps"] - 1) * self._task.order.global_batch
        self._samples += samples
        self._window_samples += samples
        if not agreed["skipped"]:
            if step <= self._newest:  # after a rollback
                LoggedStep.forget_after(self._run.run_dir.path, step - 1)
            self._newest = step
            samples = self._task.order.count(step - 1)
            self._samples += samples
            self._window_samples += samples
            self._window_waited += agreed["waited"]
            loss = agreed["loss"] / (agreed["count"] or 1)
            if self._bar:
                self._bar.update(self._task_id, completed=step, loss=loss, rate=self._rate)
            if step % self._run.config.log.every == 0 or step in (self._first + 1, self._last):
                self._log(step, loss, agreed)
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
        seconds = time.perf_counter() - self._start
        return {"speed": f"{self._samples / seconds:,.0f} samples/s"}

    def _log(self, step: int, loss: float, agreed: Mapping[str, Any]) -> None:
        seconds = self._reported - self._window_start
        self._rate = self._window_samples / seconds
        waited = self._window_waited / seconds
        self._window_start, self._window_samples, self._window_waited = self._reported, 0, 0.0
        unreadable = round(agreed["unreadable"])
        line = LoggedStep(
            step=step,
            loss=loss,
            samples_per_second=round(self._rate, 1),
            time=time.time(),
            data_wait=round(waited, 4),
            more={
                **{name: round(self._rate * by, 4) for name, by in self._factors.items()},
                "epoch": self._task.epochs(step),
                "lr": self._rate_of(step - 1, self._last),
                "grad_norm": agreed["grad_norm"],
                **({"unreadable": unreadable} if unreadable else {}),
                **self._fields(),
            },
        )
        self._journal.append(line.as_dict())
        self._on_logged(step, line.as_dict())
        if not self._bar:
            self._run.say(
                f"step {step}/{self._last}  loss {loss:.4f}  "
                f"{self._rate:,.0f} samples/s  {self._left(step)} left"
            )

    def _left(self, step: int) -> str:
        per_step = (time.perf_counter() - self._start) / max(1, step - self._first)
        return str(timedelta(seconds=round(per_step * (self._last - step))))


def _bar(console: Console) -> Progress:
    """Return a progress bar; lines that are printed meanwhile appear above it."""
    return Progress(
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("{task.fields[rate]:,.0f} samples/s"),
        TimeRemainingColumn(),
        console=console,
    )
