"""Profile a few steps: a trace, tables and the allocator, or marks for Nsight."""

import gzip
import json
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rollcall.config import ConfigError
from rollcall.records.phases import Phases
from rollcall.records.profile import RankProfile
from rollcall.train import torch_private
from rollcall.train.ranks.activity import doing
from rollcall.train.ranks.clock import COMMUNICATION, OTHER, clock
from rollcall.train.ranks.run import Run

MAX_STEPS = 1000
"""The largest number of steps of a profile: traces are large."""
ROWS = 15
"""Operators that the table shows."""


class Profiler:
    """Profiles the steps that the configuration or a person asks for; other steps cost nothing."""

    def __init__(self, run: Run) -> None:
        """Plan the configured profile; raise ConfigError if the run has no such steps or ranks."""
        self._run, self._progress, steps = run, run.progress, run.progress.steps
        self._plans: list[tuple[int, int]] = []  # first steps and ends
        self._profile: _Profile | None = None
        self._end = 0  # of the profile that has begun
        self._configured: tuple[int, ...] = 0, 0  # first step and end, on all ranks
        clock.on_step = None
        config, ranks = run.config.profile, run.world.world_size
        if config.steps is None:
            return
        first, end = self._configured = tuple(map(int, config.steps.split(":")))
        if first > steps or end - first > MAX_STEPS:
            limit = f"at most {MAX_STEPS} of the steps 1 to {steps}"
            raise ConfigError(f"profile.steps={config.steps}: expected {limit}")
        chosen = [] if config.ranks == "all" else [int(rank) for rank in config.ranks.split(",")]
        if wrong := [rank for rank in chosen if rank >= ranks]:
            raise ConfigError(
                f"profile.ranks={config.ranks}: rank {wrong[0]} does not exist; expected ranks "
                f"from 0 to {ranks - 1}, or all"
            )
        if config.tool == "nsight" and run.world.device.type != "cuda":
            raise ConfigError("profile.tool=nsight needs GPUs; choose profile.tool=torch on CPUs")
        if not chosen or run.world.rank in chosen:
            self._plans.append((first, end))

    def plan(self, first: int, end: int) -> None:
        """Profile the steps from `first` to `end`, moved behind the configured ones."""
        start, stop = self._configured
        delay = stop - first if first < stop and start < end else 0
        self._plans.append((first + delay, end + delay))
        clock.on_step = self.after_step

    @doing("profiling", may_take_long=True)
    def after_step(self) -> None:
        """Begin or end a profile between two steps."""
        following = self._progress.step + 1
        if self._profile is not None and following >= self._end:
            self.close()
        self._plans = [plan for plan in self._plans if plan[0] >= following]
        if self._profile is None and (following in (now := dict(self._plans))):
            is_nsight = self._run.config.profile.tool == "nsight"
            self._end = now[following]
            self._profile = (_Nsight if is_nsight else _Profile)(self._run, following)
        clock.on_step = self.after_step if self._plans or self._profile else None

    def close(self) -> None:
        """End a profile that has begun."""
        clock.on_step, clock.listener = None, None
        ended, self._profile = self._profile, None
        if ended:
            try:
                ended.end(self._progress.step)
            except (OSError, RuntimeError, ValueError) as error:  # torch may leave half a trace
                text = f"rank {self._run.world.rank} could not write a profile: {error}"
                print(f"rollcall: warning: {text}", file=sys.stderr, flush=True)


class _Profile:
    def __init__(self, run: Run, first: int) -> None:
        self._run, self._first = run, first
        self._is_on_gpu = run.world.device.type == "cuda"
        activities = [ProfilerActivity.CPU]
        if self._is_on_gpu:
            activities.append(ProfilerActivity.CUDA)
            torch_private.record_memory(True)
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # hides a complaint about a missing GPU
        self._torch = profile(activities=activities, record_shapes=True)
        self._torch.start()
        self._thread = threading.get_ident()
        self._before = clock.totals()
        self._open(OTHER)
        clock.listener = self._enter

    def _open(self, phase: int) -> None:
        self._range = record_function(Phases.PHASES[phase])
        self._range.__enter__()  # type: ignore[no-untyped-call]

    def _close(self) -> None:
        self._range.__exit__(None, None, None)

    def _enter(self, phase: int) -> None:
        if threading.get_ident() == self._thread:  # on GPUs another thread runs the backward pass
            self._close()
            self._open(phase)

    def end(self, last: int) -> None:
        """End the profile after the step `last` and write it."""
        self._close()
        self._torch.stop()  # waits for the GPU
        (done, total), (before, since) = clock.totals(), self._before
        steps = max(1, done - before)
        seconds = [(now - then) / steps for now, then in zip(total, since, strict=True)]
        run, rank = self._run, self._run.world.rank
        names = {"first": self._first, "last": last, "rank": rank}
        folder = RankProfile.path_in(run.run_dir.path, **names).parent
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / f"trace-{rank}.json.gz"
        self._torch.export_chrome_trace(str(trace))
        files = [trace.name]
        if self._is_on_gpu:
            files.append(f"memory-{rank}.pickle")
            torch_private.dump_memory(folder / files[-1])
            torch_private.record_memory(False)
        exposed, source = seconds[COMMUNICATION], "the time in which the rank waited for others"
        if kernels := _kernels(trace) if self._is_on_gpu else []:
            exposed, source = _exposed(kernels) / steps, "from the trace: only NCCL ran on the GPU"
        RankProfile(
            seconds=sum(seconds),
            phases=dict(zip(Phases.PHASES, seconds, strict=True)),
            exposed=exposed,
            exposed_by=source,
            operators=self._torch.key_averages().table(
                sort_by=f"self_{'device' if self._is_on_gpu else 'cpu'}_time_total",
                row_limit=ROWS,
                max_name_column_width=40,
            ),
            files=files,
            **names,
        ).write(run.run_dir.path)
        run.say(f"rollcall: profile of steps {self._first} to {last}: {folder}")


class _Nsight(_Profile):
    """Marks for `nsys profile --capture-range=cudaProfilerApi`, without torch's profiler."""

    def __init__(self, run: Run, first: int) -> None:
        self._first, self._thread = first, threading.get_ident()
        torch.cuda.synchronize(run.world.device)
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        self._open(OTHER)
        clock.listener = self._enter

    def _open(self, phase: int) -> None:
        torch.cuda.nvtx.range_push(Phases.PHASES[phase])  # type: ignore[no-untyped-call]

    def _close(self) -> None:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def end(self, last: int) -> None:  # noqa: ARG002
        """End the capture."""
        self._close()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def _kernels(trace: Path) -> list[dict[str, Any]]:
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    return [event for event in events if event.get("ph") == "X" and event.get("cat") == "kernel"]


def _exposed(kernels: Iterable[dict[str, Any]]) -> float:
    """Return the seconds in which kernels of NCCL ran on the GPU and no others."""
    ends = []
    for event in kernels:
        is_nccl = "nccl" in event["name"].lower()
        ends += [(event["ts"], 1, is_nccl), (event["ts"] + event["dur"], -1, is_nccl)]
    running = {True: 0, False: 0}
    total = before = 0.0
    for at, change, is_nccl in sorted(ends):
        if running[True] and not running[False]:
            total += at - before
        running[is_nccl] += change
        before = at
    return total / 1e6
