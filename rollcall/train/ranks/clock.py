"""Measure the phases of every step on this rank, without waiting for a GPU.

A step is always in one phase, so the phases add up to its wall clock. On CPUs the clock is the
host's. On GPUs it is an event on the stream at each change of phase: the time of a phase is how
long it kept the GPU, computing or idle, and what the computation hides is not counted.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from operator import add, gt
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rollcall.train import torch_private

DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, OTHER, AWAY = range(7)
"""Places of the phases in lists, as in `Phases.PHASES`; what is AWAY is not part of a step."""
NEVER = [float("inf")] * 6


class Clock:
    """The phases of this process; `clock` is the only one."""

    def __init__(self) -> None:
        self.listener: Callable[[int], None] | None = None  # called with each phase
        self.on_step: Callable[[], None] | None = None  # called between two steps
        self.waits = False  # whether the thread of the steps itself waits in collectives
        self._total, self._late, self._steps = [0.0] * 6, [0] * 6, 0
        self._taken = 0, [0.0] * 6  # steps and seconds at the newest `take`
        self.start(torch.device("cpu"))
        self._phase = AWAY

    def start(self, device: torch.device) -> None:
        """Begin a step, and forget the one that was not ended."""
        self._device = device
        self._pool: list[Any] | None = [] if device.type == "cuda" else None  # unused events
        self._marks: deque[tuple[int, Any]] = deque()  # phases that began, with their events
        self._ends: deque[Any] = deque()  # events that end a step
        self._thread = threading.get_ident()
        self._phase, self._since = OTHER, time.perf_counter()
        self._spent = [0.0] * 7  # seconds of the current step
        self.limits = NEVER  # seconds of each phase above which a step counts as late
        self._begin(OTHER)

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Measure the steps in the context."""
        self.start(device)
        with torch_private.waits_replaced(self.waiting) if self.waits else nullcontext():
            try:
                yield
            finally:
                self.stop()

    def enter(self, phase: int) -> int:
        """Begin a phase and end the one before, which is returned."""
        before = self._phase
        if before not in (phase, AWAY):
            if self.listener:
                self.listener(phase)
            if self._pool is None:  # as in `_begin`, without the call: this runs often
                now = time.perf_counter()
                self._spent[before] += now - self._since
                self._phase, self._since = phase, now
            else:
                self._begin(phase)
        return before

    def step(self) -> None:
        """End a step; the next one begins at once."""
        self._begin(OTHER)
        if self._pool is None:
            self._fold()
        else:
            self._ends.append(self._marks[-1][1])
            self._drain(self._pool)
        if self.on_step:
            with self.away():
                self.on_step()

    def totals(self) -> tuple[int, list[float]]:
        """Return all steps that ended, and the seconds of their phases."""
        if self._pool is not None:
            self._drain(self._pool)
        return self._steps, self._total[:]

    def _drain(self, pool: list[Any]) -> None:
        """Count the phases whose events have taken place."""
        while len(self._marks) > 1 and self._marks[1][1].query():
            phase, begun = self._marks.popleft()
            ended = self._marks[0][1]
            self._spent[phase] += begun.elapsed_time(ended) / 1000
            pool.append(begun)
            if self._ends and self._ends[0] is ended:
                self._ends.popleft()
                self._fold()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Leave out what happens in the context: an evaluation or a save is not part of a step."""
        phase = self._phase
        self.stop()
        try:
            yield
        finally:
            self._begin(phase)

    def stop(self) -> None:
        """Leave out all time from now on, until `start`."""
        self.enter(OTHER)
        self._begin(AWAY)

    def take(self) -> tuple[int, list[float], list[int]]:
        """Return the steps since the last call, their seconds and their late steps by phase."""
        (steps, total), (before, since) = self.totals(), self._taken
        late, self._late, self._taken = self._late, [0] * 6, (steps, total)
        return steps - before, [now - then for now, then in zip(total, since, strict=True)], late

    def waiting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, whose time in the thread of the steps is communication."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            before = self.enter(COMMUNICATION)
            try:
                return function(*args, **kwargs)
            finally:
                self.enter(before)

        return timed

    def _begin(self, phase: int) -> None:
        if self._pool is None:
            now = time.perf_counter()
            self._spent[self._phase] += now - self._since
            self._since = now
        else:
            event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append((phase, event))
        self._phase = phase

    def _fold(self) -> None:
        spent, self._spent = self._spent, [0.0] * 7
        self._total = [*map(add, self._total, spent)]
        self._late = [*map(add, self._late, map(gt, spent, self.limits))]
        self._steps += 1


clock = Clock()


def watch(modules: Sequence[nn.Module], is_pipeline: bool, waits: bool) -> None:
    """Let the passes of the model, or of the stages of a pipeline, enter their phases.

    The forward pass begins in the module itself, after what wraps it has talked to other ranks. The
    first backward pass shows which gradient comes last; what follows it waits for other ranks. On
    CPUs the thread itself `waits` in collectives; on GPUs the stream does.
    """
    for module in modules:
        module.register_forward_pre_hook(partial(_enter, FORWARD))
        if is_pipeline:
            module.register_forward_hook(partial(_enter, BACKWARD))
    if dist.get_world_size() > 1 and not is_pipeline:
        _LastGradient(modules[0])
    clock.waits = waits


def _enter(phase: int, *_: Any) -> None:
    if torch.is_grad_enabled():
        clock.enter(phase)


class _LastGradient:
    """Enters the communication of a step after the last gradient."""

    def __init__(self, model: nn.Module) -> None:
        self._last: torch.Tensor | None = None
        self._is_known = False
        self._hooks = [
            (weight, weight.register_post_accumulate_grad_hook(self._see))  # type: ignore[no-untyped-call]
            for weight in model.parameters()
            if weight.requires_grad
        ]
        self._begun = model.register_forward_pre_hook(self._begin)

    def _begin(self, *_: Any) -> None:
        if self._last is None:
            return
        for weight, hook in self._hooks:
            if weight is not self._last:
                hook.remove()
        self._is_known = True
        self._begun.remove()

    def _see(self, weight: torch.Tensor) -> None:
        if self._is_known:
            clock.enter(COMMUNICATION)
        else:
            self._last = weight
