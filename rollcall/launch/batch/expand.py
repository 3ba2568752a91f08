"""Find out, while the step of an elastic job runs, whether it could run on more hosts.

Lost hosts that still belong to the job are tried again. For other hosts, Slurm is asked whether
enough would be free at once; to get those, the job must be requeued.
"""

import subprocess
import time

from rollcall.launch.batch import placement
from rollcall.launch.runs import find, restarts
from rollcall.launch.scheduler import cluster
from rollcall.launch.scheduler.slurm import SlurmError
from rollcall.records.job import submitted_script
from rollcall.records.run_dir import RunDir
from rollcall.system.timer import Every

HOSTS_POLL = 15.0
"""Seconds between two questions."""
FREE = 300.0
"""Seconds for which other hosts must have been free before the job is requeued for them."""


class Expansion:
    """The further hosts that an elastic job could use."""

    def __init__(self, run: RunDir, job: str, hosts: placement.Hosts) -> None:
        self.back: set[str] = set()  # lost hosts that answer again
        self._run = run
        self._job = job
        self._hosts = hosts
        self._script = submitted_script(run.job, job)
        text = self._script.read_text() if self._script.exists() else ""
        last = find.newest_attempt(run)
        was_requeued = restarts.newest(run, job) == "more hosts"
        was_in_vain = was_requeued and last is not None and len(hosts.all) <= len(last.hosts)
        self._may_requeue = "\n#SBATCH --requeue\n" in text and not was_in_vain
        self._timer = Every(HOSTS_POLL, at_once=False)
        self._probes: dict[str, subprocess.Popen[bytes]] = {}
        self._question: subprocess.Popen[bytes] | None = None
        self._free_since = float("inf")

    def is_due(self) -> bool:
        """Return True if the step should end now to start on more hosts; ask for news."""
        self._listen()
        if self._timer.is_due():
            self._ask()
        return bool(self.back) or time.monotonic() - self._free_since > FREE

    def take_back(self) -> None:
        """Count the hosts that answer again as alive."""
        self._hosts.dead -= self.back
        self.back = set()

    def _ask(self) -> None:
        for process in self._probes.values():  # no answer in all this time
            process.terminate()
            process.wait()
        missing = {*self._hosts.dead}
        if missing:  # else there is no need to read how all attempts failed
            missing.difference_update(restarts.bad_hosts(self._run, self._job))
        self._probes = {host: placement.probe(self._hosts.job, host) for host in missing}
        if self._hosts.lacking and self._may_requeue and self._question is None:
            try:
                self._question = cluster.ask_for_nodes(self._script, self._hosts.lacking)
            except SlurmError:  # no sbatch on the nodes
                self._may_requeue = False

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
        if start is None or start > time.time() + HOSTS_POLL:
            self._free_since = float("inf")
        else:
            self._free_since = min(self._free_since, time.monotonic())
