"""Can the step of an elastic job run on more hosts than it does? Asked beside it.

Lost hosts are tried again, as long as they are the job's. Where Slurm has taken them away, or never
gave the job as many as it may have, Slurm is asked whether as many would be free at once: for them
the job would have to be queued again.
"""

from __future__ import annotations

import subprocess
import time

from launch import cluster, restarts, runs, spares
from launch.slurm import SlurmError
from launch.spares import Hosts
from train.run import RunDir

LOOK = 15.0
"""Seconds between two questions."""
FREE = 300.0
"""Seconds for which other hosts must have been free before the job is queued again for them."""


class Widening:
    """What is known of further hosts.

    Attributes:
        back: lost hosts that answer again.
    """

    def __init__(self, run: RunDir, job: str, hosts: Hosts) -> None:
        """Ask nothing yet.

        Args:
            run: the run.
            job: the id of its job.
            hosts: the job's hosts.
        """
        self.back: set[str] = set()
        self._run = run
        self._job = job
        self._hosts = hosts
        self._script = run.job / f"{job}_submission.sh"  # as submitit calls it
        self._may_queue = self._is_queued_again() and not self._was_in_vain()
        self._next = time.monotonic() + LOOK
        self._probes: dict[str, subprocess.Popen[bytes]] = {}
        self._question: subprocess.Popen[bytes] | None = None
        self._free_since = float("inf")

    def is_due(self) -> bool:
        """Whether the step may end now to start on more hosts; asks what there is to ask."""
        self._listen()
        now = time.monotonic()
        if now > self._next:
            self._next = now + LOOK
            self._ask()
        return bool(self.back) or now - self._free_since > FREE

    def take_back(self) -> None:
        """Count the hosts that answer again among those that live."""
        self._hosts.dead -= self.back
        self.back = set()

    def _is_queued_again(self) -> bool:
        """Whether the job has a script that says all that it needs, and may come back."""
        return self._script.exists() and "\n#SBATCH --requeue\n" in self._script.read_text()

    def _was_in_vain(self) -> bool:
        """Whether the job has been queued again for more hosts already, and has no more."""
        last = runs.attempts(self._run)[-1:]
        asked = restarts.newest(self._run, self._job) == "more hosts"
        return asked and bool(last) and len(self._hosts.all) <= len(last[0].hosts)

    def _ask(self) -> None:
        for process in self._probes.values():  # not answered in all this time
            process.terminate()
            process.wait()
        missing = self._hosts.dead.difference(restarts.bad_hosts(self._run, self._job))
        self._probes = {host: spares.probe(self._hosts.job, host) for host in missing}
        if self._hosts.lacking and self._may_queue and self._question is None:
            try:
                self._question = cluster.ask_for_nodes(self._script, self._hosts.lacking)
            except SlurmError:  # no sbatch on the nodes
                self._may_queue = False

    def _listen(self) -> None:
        answered = [host for host, process in self._probes.items() if process.poll() is not None]
        for host in answered:
            if self._probes.pop(host).returncode == 0:
                self.back.add(host)
        if self._question is None or self._question.poll() is None:
            return
        answer = self._question.stderr.read() if self._question.stderr else b""
        self._question = None
        start = cluster.expected_start(answer.decode())
        if start is None or start > time.time() + LOOK:
            self._free_since = float("inf")
        else:
            self._free_since = min(self._free_since, time.monotonic())
