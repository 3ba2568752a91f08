"""`rollcall array`: run the tasks of an array on this machine, as many at once as fit.

Each task is a separate local run. It gets an equal share of this machine's CPUs and GPUs.
"""

import contextlib
import os
import signal
import sys
import time
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import submitit

from rollcall.launch.node.identity import visible_gpus
from rollcall.launch.runs import exit_code, resolve
from rollcall.launch.scheduler.job import array_tasks
from rollcall.launch.submission.executors import Local
from rollcall.records.job import Cancellation, Submission
from rollcall.records.run_dir import RunDir
from rollcall.system import hosts

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
T = TypeVar("T")


class Share(NamedTuple):
    """The part of this machine that a task may use."""

    cpus: list[int]
    gpus: list[str]


class Running(NamedTuple):
    """A task that has started."""

    job: submitit.Job[None]
    share: Share
    run: RunDir


def main(argv: Sequence[str]) -> int:
    """Run all tasks; return 0 if all of them succeed."""
    parser = ArgumentParser(prog="rollcall array", allow_abbrev=False)
    resolve.add_run_options(parser)
    parser.add_argument("--tasks", required=True, help="as for sbatch's --array")
    parser.add_argument("--nodes", type=int, default=1, help="simulated nodes of each task")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each task")
    parser.add_argument("--minutes", type=float, help="time limit of each task")
    parser.add_argument("--cpus", type=int, default=1, help="CPUs of each task")
    parser.add_argument("command", nargs=REMAINDER, metavar="-- COMMAND")
    options = parser.parse_args(argv)
    tasks, throttle = array_tasks(options.tasks)
    shares = divide(throttle, options.cpus, options.gpus, len(tasks))
    return Array(options, tasks, shares).run()


def divide(throttle: int | None, cpus: int, gpus: int, tasks: int) -> list[Share]:
    """Divide this machine among the tasks that run at once; those that do not fit share a part."""
    usable, cards = sorted(os.sched_getaffinity(0)), visible_gpus(os.environ)
    # A task that asks for no GPU still gets one, or cells of a sweep would differ in device.
    fit = len(cards) // (gpus or 1) if cards else hosts.usable_cpus() // cpus
    count = max(1, min(throttle or fit, tasks))

    def part(items: list[T], number: int) -> list[T]:
        first = number * len(items) // count
        return items[first : max(first + 1, (number + 1) * len(items) // count)]

    return [Share(part(usable, number), part(cards, number)) for number in range(count)]


class Array:
    """The waiting and the running tasks of an array, and the free shares of the machine."""

    def __init__(self, options: Namespace, tasks: Sequence[int], shares: Sequence[Share]) -> None:
        self._options = options
        self._waiting = list(tasks)
        self._free = list(shares)
        self._running: list[Running] = []
        self._is_asked_to_stop = False
        self._has_failed = False

    def run(self) -> int:
        """Run all tasks, or until a signal asks to stop; return the exit code."""
        for number in STOP:
            signal.signal(number, self._stop)
        while self._running or (self._waiting and not self._is_asked_to_stop):
            while self._waiting and self._free and not self._is_asked_to_stop:
                self._start(self._waiting.pop(0), self._free.pop())
            time.sleep(0.5)
            for entry in [entry for entry in self._running if entry.job.done()]:
                self._running.remove(entry)
                self._free.append(entry.share)
                code = exit_code.of_run(entry.run, [entry.job.job_id])
                self._has_failed |= code != 0
                self._say(f"{entry.run.name} has ended, exit code {code}")
        return int(self._has_failed or self._is_asked_to_stop)

    def _stop(self, *_: object) -> None:
        self._is_asked_to_stop = True
        for entry in self._running:
            with contextlib.suppress(OSError):  # a full disk
                Cancellation([entry.job.job_id], time.time()).append(entry.run.path)
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(entry.job.job_id), signal.SIGTERM)

    def _start(self, task: int, share: Share) -> None:
        os.environ["SLURM_ARRAY_TASK_ID"] = str(task)  # scripts read it, as under Slurm
        if share.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
        run, _ = resolve.named_run(self._options, os.environ)
        run.create()
        run.job.mkdir(exist_ok=True)
        all_cpus = os.sched_getaffinity(0)
        os.sched_setaffinity(0, share.cpus)  # the task inherits it
        try:
            command = self._options.command[1:]
            job = Local(run.job).start(command, self._options.nodes, self._options.minutes)
        finally:
            os.sched_setaffinity(0, all_cpus)
        Submission(job.job_id, time.time()).append(run.path)
        self._running.append(Running(job, share, run))
        if self._is_asked_to_stop:  # asked during the start
            self._stop()
        self._say(f"{run.name} runs as process {job.job_id}")

    def _say(self, text: str) -> None:
        print(f"array: {text}", file=sys.stderr, flush=True)
