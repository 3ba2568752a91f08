"""How is it going? One line per logged step on disk, a progress bar or plain lines for people.

Only rank 0 holds a Metrics that writes; losses are means over the whole global batch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from train.run import Journal, RunDir, read_lines, write_atomic


@dataclass(frozen=True)
class StepResult:
    """What all ranks agreed on about one step.

    Attributes:
        step: updates done, this one included.
        loss: mean over the samples of the step.
        samples: how many those were.
        waited: seconds for data, as a mean over the ranks.
        ended: when the update was begun, by time.perf_counter: what was waited was so before.
    """

    step: int
    loss: float
    samples: int
    waited: float
    ended: float


class Metrics:
    """Writes metrics.jsonl and shows the progress of the run."""

    def __init__(
        self,
        run_dir: RunDir,
        every: int,
        first_step: int,
        last_step: int,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        """Begin to count.

        Args:
            factors: by what to multiply samples per second for further figures.
        """
        self._factors = factors or {}
        self._run_dir = run_dir
        self._journal = Journal(run_dir.metrics)
        self._every = every
        self._first, self._last = first_step, last_step
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._window_start = time.perf_counter()
        self._window_samples = 0
        self._window_waited = 0.0
        self._rate = 0.0
        self._samples = 0
        self._start = self._window_start
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            self._open_bar()

    def forget_after(self, step: int) -> None:
        """Drop the lines of steps that a resumed run does again."""
        if self._run_dir.metrics.exists():
            kept = [line for line in read_lines(self._run_dir.metrics) if line["step"] <= step]
            write_atomic(self._run_dir.metrics, "".join(json.dumps(line) + "\n" for line in kept))

    def step(self, result: StepResult, **fields: Any) -> None:
        """Count a step; log it when it is its turn.

        Args:
            fields: further values of the line, such as the learning rate.
        """
        self._samples += result.samples
        self._window_samples += result.samples
        self._window_waited += result.waited
        if self._bar is not None:
            self._bar.update(self._task, completed=result.step, loss=result.loss, rate=self._rate)
        if result.step % self._every and result.step not in (self._first + 1, self._last):
            return
        seconds = result.ended - self._window_start
        self._rate = self._window_samples / seconds
        waited = self._window_waited / seconds
        self._window_start, self._window_samples, self._window_waited = result.ended, 0, 0.0
        self._journal.append(
            {
                "step": result.step,
                "loss": result.loss,
                "samples_per_second": round(self._rate, 1),
                **{name: round(self._rate * by, 4) for name, by in self._factors.items()},
                "data_wait": round(waited, 4),
                "time": time.time(),
                **fields,
            },
        )
        if self._bar is None:
            self.say(
                f"step {result.step}/{self._last}  loss {result.loss:.4f}  "
                f"{self._rate:,.0f} samples/s  {self._left(result.step)} left"
            )

    def say(self, text: str) -> None:
        """One line for people, above the progress bar where there is one."""
        (self._bar.console if self._bar else self._console).print(text, markup=False)

    def close(self) -> None:
        """Leave the terminal in order."""
        if self._bar is not None:
            self._bar.stop()

    def summary(self, rows: dict[str, str]) -> None:
        """The table at the end of a run."""
        table = Table(show_header=False)
        for name, value in rows.items():
            table.add_row(name, value)
        self._console.print(table)

    @property
    def mean_rate(self) -> float:
        """Samples per second since this attempt began."""
        return self._samples / (time.perf_counter() - self._start)

    def _left(self, step: int) -> str:
        per_step = (time.perf_counter() - self._start) / max(1, step - self._first)
        minutes, seconds = divmod(round(per_step * (self._last - step)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}"

    def _open_bar(self) -> None:
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TextColumn("{task.fields[rate]:,.0f} samples/s"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task(
            "train", total=self._last, completed=self._first, loss=0.0, rate=0.0
        )
        self._bar.start()
