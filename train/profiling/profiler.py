"""Profile a few steps: a trace, tables, a flame graph and the allocator, or marks for Nsight."""

import gzip
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rollcall.activity import doing
from rollcall.config import ConfigError
from rollcall.records.phases import Phases
from rollcall.records.profile import Profile
from rollcall.train.dist.clock import COMMUNICATION, OTHER, clock
from rollcall.train.dist.run import Run
from rollcall.train.profiling.flames import Flames

MOST = 1000
"""The most steps of a profile: traces are large."""
BYTES = {"double": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2}
"""Bytes of an element by its type, which gloo and NCCL write with other capitals; else 1."""


class Profiler:
    """Profiles the steps that the configuration or a person asks for; costs nothing meanwhile."""

    def __init__(self, run: Run, step: Callable[[], int], steps: int) -> None:
        """Plan the configured profile; `step` returns the updates done, and `steps` are all.

        Raise ConfigError if the run does not have these steps or ranks.
        """
        self._run, self._step = run, step
        self._plans: list[tuple[int, int]] = []  # first steps and ends
        self._profile: _Profile | None = None
        self._end = 0  # of the profile that has begun
        clock.on_step = None
        config, ranks = run.config.profile, run.world.world_size
        if config.steps is None:
            return
        first, end = map(int, config.steps.split(":"))
        if first > steps or end - first > MOST:
            raise ConfigError(
                f"profile.steps={config.steps}: expected at most {MOST} of the steps 1 to {steps}"
            )
        chosen = [] if config.ranks == "all" else [int(rank) for rank in config.ranks.split(",")]
        wrong = [rank for rank in chosen if rank >= ranks]
        if wrong:
            text = f"profile.ranks={config.ranks}: rank {wrong[0]} does not exist"
            raise ConfigError(f"{text}; expected ranks from 0 to {ranks - 1}, or all")
        if config.tool == "nsight" and run.world.device.type != "cuda":
            raise ConfigError("profile.tool=nsight needs GPUs; choose profile.tool=torch on CPUs")
        if not chosen or run.world.rank in chosen:
            self._plans.append((first, end))

    def begin(self) -> None:
        """Begin to look for the steps to profile, of which the first may be the next one."""
        if self._plans:
            self.after_step()

    def plan(self, first: int, end: int) -> None:
        """Profile the steps from `first` up to `end`, unless another profile runs then."""
        self._plans.append((first, end))
        clock.on_step = self.after_step

    @doing("profiling", may_take_long=True)
    def after_step(self) -> None:
        """Begin or end a profile between two steps."""
        following = self._step() + 1
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
        found, self._profile = self._profile, None
        if found:
            try:
                found.end(self._step())
            except (OSError, RuntimeError, ValueError) as error:  # torch leaves half a trace
                text = f"rollcall: warning: rank {self._run.world.rank} could not write a profile"
                print(f"{text}: {error}", file=sys.stderr, flush=True)


class _Profile:
    """A profile that has begun."""

    def __init__(self, run: Run, first: int) -> None:
        self._run, self._first = run, first
        self._is_on_gpu = run.world.device.type == "cuda"
        activities = [ProfilerActivity.CPU]
        if self._is_on_gpu:
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else it complains of a missing GPU
        self._torch = profile(activities=activities, record_shapes=True)
        self._torch.start()
        self._flames = Flames()
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
        if threading.get_ident() == self._thread:  # on GPUs another one runs the backward pass
            self._close()
            self._open(phase)

    def end(self, last: int) -> None:
        """Write what was found up to the step `last`."""
        self._close()
        self._torch.stop()  # waits for the GPU
        stacks = self._flames.end()
        (done, total), (before, since) = clock.totals(), self._before
        steps = max(1, done - before)
        seconds = [(now - then) / steps for now, then in zip(total, since, strict=True)]
        run, rank = self._run, self._run.world.rank
        names = {"first": self._first, "last": last, "rank": rank}
        folder = Profile.place(run.run_dir.path, **names).parent
        folder.mkdir(parents=True, exist_ok=True)
        trace, flames = folder / f"trace-{rank}.json.gz", folder / f"python-{rank}.stacks"
        self._torch.export_chrome_trace(str(trace))
        flames.write_text(stacks)
        files = [trace.name, flames.name]
        if self._is_on_gpu:
            files.append(f"memory-{rank}.pickle")
            torch.cuda.memory._dump_snapshot(str(folder / files[-1]))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        with gzip.open(trace, "rt") as file:
            events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
        kernels = [event for event in events if event.get("cat") == "kernel"]
        exposed, how = seconds[COMMUNICATION], "the time in which the rank waited for others"
        if kernels:
            exposed, how = _exposed(kernels) / steps, "from the trace: only NCCL ran on the GPU"
        Profile(
            seconds=sum(seconds),
            phases=dict(zip(Phases.PHASES, seconds, strict=True)),
            exposed=exposed,
            exposed_by=how,
            operators=self._operators(),
            collectives=_collectives(events),
            files=files,
            **names,
        ).write(run.run_dir.path)
        run.say(f"rollcall: profile of steps {self._first} to {last}: {folder}")

    def _operators(self) -> list[dict[str, Any]]:
        """Return the operators by the time in them alone: of the GPU if there is one."""
        found = []
        for one in self._torch.key_averages():
            spent = one.self_device_time_total if self._is_on_gpu else one.self_cpu_time_total
            if one.key not in Phases.PHASES and not one.key.startswith("gloo:"):
                found.append({"name": one.key, "calls": one.count, "seconds": spent / 1e6})
        return sorted(found, key=lambda one: -one["seconds"])[:50]


class _Nsight(_Profile):
    """Marks for `nsys profile --capture-range=cudaProfilerApi`, which runs without torch's."""

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


def _collectives(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return collectives of the same kind and size as one row, the longest first."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for event in events:
        if (size := _size(event)) is not None:
            name = event.get("args", {}).get("Collective name") or event["name"]
            new = {"name": name, "bytes": size, "calls": 0, "seconds": 0.0}
            row = rows.setdefault((name, size), new)
            row["calls"] += 1
            row["seconds"] += event["dur"] / 1e6
    return sorted(rows.values(), key=lambda row: -row["seconds"])


def _size(event: dict[str, Any]) -> int | None:
    """Return the bytes that a rank gives to a collective; None for other events."""
    args: dict[str, Any] = event.get("args", {})
    if event.get("cat") == "kernel" and "In msg nelems" in args:
        return int(args["In msg nelems"]) * BYTES.get(args.get("dtype", "").lower(), 1)
    if not event["name"].startswith("gloo:") or not args.get("Input Dims"):
        return None
    pairs = zip(args["Input Dims"], args["Input type"], strict=True)
    return sum(math.prod(map(int, shape)) * BYTES.get(kind.lower(), 1) for shape, kind in pairs)


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
