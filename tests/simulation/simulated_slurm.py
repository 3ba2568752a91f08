"""A job of a simulated Slurm: its batch script, its steps, and the commands that change them."""

from __future__ import annotations

import functools
import io
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simulated_disk import Client
from simulated_hosts import Cluster, Host
from simulated_time import Process

from rollcall.system.hosts import expand

JOB = "7"
ANSWER = 0.1
"""Seconds that a command of Slurm's takes."""
KILL_WAIT = 30.0
"""Seconds between SIGTERM and SIGKILL when a job ends."""
NODE_TIMEOUT = 300.0
"""Seconds after which Slurm notices that a host is down."""
RETRIES = 0.5
"""How often Slurm ends a step later on a host that it could not reach."""
Start = Callable[[Process, int, str, Sequence[str]], int]
"""The supervisor of a step: its process, number, the step's key and hosts; returns its code."""
Look = Callable[[Process, Sequence[Host]], None]
"""Called with the batch process and the hosts when a step of supervisors starts."""


class Child:
    """A `subprocess.Popen`; `words` is the command."""

    def __init__(self, slurm: Slurm, words: Sequence[str], env: Mapping[str, str] | None) -> None:
        self._slurm, self._clock = slurm, slurm.cluster.clock
        self.returncode: int | None = None
        self.stdout = self.stderr = io.BytesIO()
        self.tasks: dict[Process, int | None] = {}
        parent = self._clock.task().process
        self.process = slurm.cluster.start(parent.host, words[0])
        self.pid, self.parent, self._env = self.process.pid, parent, dict(env or parent.environ)
        self._clock.spawn(self.process, lambda: self._run(list(words)))

    def _run(self, words: list[str]) -> None:
        if words[0] == "srun":
            self._end(self._slurm.run_step(self, words, self._env))
        else:
            self._clock.sleep(ANSWER)
            code, text = self._slurm.answer(words)
            self.stdout = io.BytesIO(text.encode())
            self._end(code)

    def _end(self, code: int) -> None:
        self.returncode = code
        self._slurm.cluster.end(self.process)
        if not self.parent.is_dead:
            self._slurm.cluster.kill(self.parent.pid, signal.SIGCHLD)

    def poll(self) -> int | None:
        if self.returncode is None and self.process.is_dead:
            self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else self._clock.now + timeout
        while self.poll() is None:
            if end is not None and self._clock.now >= end:
                raise subprocess.TimeoutExpired("srun", timeout or 0)
            self._clock.sleep(ANSWER)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        self._slurm.cluster.end(self.process)

    terminate = kill

    def send_signal(self, number: int) -> None:
        for task in self.tasks:
            self._slurm.signal(task, number)


class Slurm:
    """The controller, and the one job that it knows."""

    def __init__(self, cluster: Cluster, supervise: Start, look: Look, may_lose: bool) -> None:
        self.cluster, self._supervise, self._may_lose = cluster, supervise, may_lose
        self._look_at_start = look
        self.state, self.is_requeued = "RUNNING", False
        self.was_left = False  # by all its processes
        self.controller = Host(-1, "ctl", Client())
        self.steps: dict[int, Child] = {}
        self.batch: list[Process] = []
        self._next_step = 0

    def start(self, host: Host, argv: Sequence[str], env: Mapping[str, str]) -> int:
        """Run a batch process; return its exit code."""
        from rollcall.launch.batch import batch

        process = self.cluster.clock.task().process
        process.environ = dict(env)
        if "--number=" in " ".join(argv) or not self.batch:  # else it stands by
            self.batch.append(process)
        try:
            code = batch.main(argv)
        except SystemExit as error:
            code = int(error.code or 0)
        self.cluster.say(f"the batch process on {host.name} ends with exit code {code}")
        return code

    def begin(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the job."""
        host = self.cluster.hosts[0]
        process = self.cluster.start(host, "batch")

        def body() -> None:
            self.start(host, argv, env)
            self.cluster.end(process)
            self.end()

        self.cluster.clock.spawn(process, body)
        self._look()

    def _look(self) -> None:
        """Look after the job: its batch script may have been killed, its hosts may have died."""
        clock, first = self.cluster.clock, self.batch[:1]
        if self.state != "RUNNING":
            return
        if any(process.is_dead and not process.host.is_off for process in first):
            self.cluster.say("the batch process was killed: Slurm ends the job")
            self.end()
        down = [host for host in self.cluster.hosts if host.is_off]
        may_wait = down and not self._may_lose  # for NODE_TIMEOUT
        processes = [process for host in self.cluster.hosts for process in host.processes]
        if all(process.is_dead for process in processes) and not may_wait:
            self.cluster.say("the time limit of the job ends it: nothing of it is left")
            self.was_left = True
            self.end()
        for host in down:
            if host.off_since + NODE_TIMEOUT < clock.now and not self._may_lose:
                self.cluster.say(f"Slurm requeues the job, because {host.name} is down")
                self.is_requeued = True
                self.end()
                break
        clock.at(clock.now + 1.0, self._look)

    def preempt(self) -> None:
        """Take the nodes away from the job, and requeue it if it does not do so itself."""

        def take() -> None:
            if self.state == "RUNNING":
                self.cluster.say("Slurm requeues the job")
                self.is_requeued = True
                self.end()

        for host in self.cluster.hosts:
            for process in host.processes:
                if process.name.startswith("supervisor"):
                    self.signal(process, signal.SIGTERM)
        self.cluster.clock.at(self.cluster.clock.now + KILL_WAIT, take)

    def end(self) -> None:
        """End all processes of the job."""
        if self.state != "RUNNING":
            return
        self.state, clock = "COMPLETING", self.cluster.clock
        for host in self.cluster.hosts:
            for process in host.processes:
                if process.name.startswith(("supervisor", "batch")):
                    self.signal(process, signal.SIGTERM)

        def kill() -> None:
            for host in self.cluster.hosts:
                self.cluster.when_reached(host, functools.partial(end_all, host))

        def end_all(host: Host) -> None:
            for process in list(host.processes):
                self.cluster.end(process)

        clock.at(clock.now + KILL_WAIT, kill)

    def signal(self, process: Process, number: int) -> None:
        if not process.is_dead and not process.host.is_off:
            self.cluster.kill(process.pid, number)

    def run(self, words: Sequence[str], env: Any = None, check: bool = False, **_: Any) -> Any:
        """Stand in for `subprocess.run`."""
        if words[0] != "srun":
            self.cluster.clock.sleep(ANSWER)
            code, text = self.answer(list(words))
        else:
            child = Child(self, words, env)
            code, text = child.wait(), ""
        if check and code:
            raise subprocess.CalledProcessError(code, words, "", text)
        return subprocess.CompletedProcess(words, code, text, "")

    def answer(self, words: list[str]) -> tuple[int, str]:
        """Run a command of Slurm's; return its exit code and what it prints."""
        text, random = " ".join(words), self.cluster.random
        if words[0] == "squeue":
            if "State:|" in text:
                return 0, f"{self.state}|None|N/A|N/A\n"
            if " -s " in text:
                live = [number for number, step in self.steps.items() if self._runs(step)]
                return 0, "".join(f"{JOB}.{number}\n" for number in live) + f"{JOB}.batch\n"
            return 0, f"{JOB}\n" if "%A" in text else "main|||(null)\n"
        if words[0] == "sinfo":
            return 0, "".join(f"n{number}|1|1|none|none\n" for number in range(99))
        if words[:2] == ["scontrol", "requeue"]:
            self.cluster.say("the job is requeued")
            self.is_requeued = True
            self.end()
        if words[0] == "scancel":
            names = [word for word in words[1:] if not word.startswith("-")]
            if "--batch" in words:
                self.signal(self.batch[0], signal.SIGCONT)
            elif names == [JOB]:
                self.cluster.say("the job is cancelled")
                self.end()
            else:
                for name in names:
                    for task in self.steps[int(name.partition(".")[2])].tasks:
                        end = functools.partial(self.cluster.end, task)
                        if "--signal=TERM" in words:
                            end = functools.partial(self.signal, task, signal.SIGTERM)
                        is_heard = self.cluster.reach(self.controller, task.host)
                        if is_heard or random.random() < RETRIES:
                            self.cluster.when_reached(task.host, end)
        return 0, ""

    def _runs(self, step: Child) -> bool:
        return any(code is None and not task.is_dead for task, code in step.tasks.items())

    def run_step(self, child: Child, words: list[str], env: dict[str, str]) -> int:
        """Be srun; return its exit code."""
        clock, random = self.cluster.clock, self.cluster.random
        named = next((word for word in words if word.startswith("--nodelist=")), None)
        count = next((int(word[8:]) for word in words if word.startswith("--nodes=")), 0)
        names = expand(named.partition("=")[2]) if named else []
        hosts = [host for host in self.cluster.hosts if host.name in names]
        hosts = hosts or self.cluster.hosts[:count]
        number, self._next_step = self._next_step, self._next_step + 1
        what = next(word for word in words[1:] if not word.startswith("-"))
        if what == "true":
            clock.sleep(random.uniform(0.1, 1.0))
            while not self.cluster.reach(child.process.host, hosts[0]):
                clock.sleep(1.0)
            return 0
        self.steps[number] = child
        key = f"{JOB}.{env.get('SLURM_RESTART_COUNT', '0')}.{number}"
        step_names = [host.name for host in hosts]
        if what == "supervise":
            self.cluster.say(f"step {number} starts on {', '.join(step_names)}")
            self._look_at_start(child.parent, hosts)
        for at, host in enumerate(hosts):
            name = f"supervisor {at} of step {number}" if what == "supervise" else "batch again"
            task = self.cluster.start(host, name)
            task.environ = {**env, "SLURM_STEP_ID": str(number)}
            task.is_dead = host.is_off
            child.tasks[task] = None

            def body(task: Process = task, at: int = at, host: Host = host) -> None:
                clock.sleep(random.uniform(0.1, 3.0))
                if what == "supervise":
                    code = self._supervise(task, at, key, step_names)
                else:
                    begin = next(
                        i for i, w in enumerate(words) if w.startswith(("--number=", "--output=/"))
                    )
                    code = self.start(host, words[begin:], task.environ)
                child.tasks[task] = code
                self.cluster.end(task)

            clock.spawn(task, body)
        while any(not self._is_over(task, code) for task, code in child.tasks.items()):
            clock.sleep(0.2)
        codes = [137 if code is None else code for code in child.tasks.values()]
        return max(codes)

    def _is_over(self, task: Process, code: int | None) -> bool:
        """Return True if srun knows that a task is over: of a dead host, only after minutes."""
        host: Host = task.host
        is_late = self.cluster.clock.now > host.off_since + NODE_TIMEOUT
        return code is not None or (task.is_dead and (not host.is_off or is_late))


class Environment(dict[str, str]):
    """`os.environ` of the process that looks at it."""

    def __init__(self, cluster: Cluster, real: Any) -> None:
        self._cluster, self._real = cluster, real

    def _of(self) -> Any:
        from simulated_time import current

        task = current()
        return self._real if task is None else task.process.environ

    def __getitem__(self, name: str) -> str:
        return str(self._of()[name])

    def __setitem__(self, name: str, value: str) -> None:
        self._of()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._of()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._of()

    def __iter__(self) -> Any:
        return iter(list(self._of()))

    def __len__(self) -> int:
        return len(self._of())

    def get(self, name: str, default: Any = None) -> Any:
        return self._of().get(name, default)

    def items(self) -> Any:
        return self._of().items()

    def keys(self) -> Any:
        return self._of().keys()

    def __or__(self, other: Any) -> Any:
        return {**self._of(), **other}


def environment(count: int) -> dict[str, str]:
    """The variables of a job on this many hosts."""
    names = ",".join(f"n{number}" for number in range(count))
    return {
        "SLURM_JOB_ID": JOB,
        "SLURM_JOB_NODELIST": names,
        "SLURM_RESTART_COUNT": "0",
        "XDG_STATE_HOME": "/sim/state",
        "HOME": "/sim",
        "PATH": os.defpath,
    }
