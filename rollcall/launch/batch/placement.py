"""Choose the hosts of a job on which its step runs, when some are lost, bad or free again."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from rollcall.launch.doctor import nodes
from rollcall.launch.doctor.checkup import bad_nodes
from rollcall.launch.runs import find, restarts
from rollcall.launch.scheduler import cluster, slurm
from rollcall.records.job import submitted_script
from rollcall.records.nodes import NodeReport
from rollcall.records.run_dir import RunDir
from rollcall.system import hosts
from rollcall.system.timer import Every

ANSWER = 5.0
"""Seconds in which a live host starts a process."""
HOSTS_POLL = 15.0
"""Seconds between two questions."""
FREE = 300.0
"""Seconds for which other hosts must have been free before the job is requeued for them."""


class NoSpareError(Exception):
    """Too few hosts are left: those in `dead` do not answer."""

    def __init__(self, dead: Sequence[str], why: str = "it has too few nodes left") -> None:
        super().__init__(f"cannot reach {', '.join(dead)}: {why}")
        self.dead = tuple(dead)


class Hosts:
    """A job's hosts: `nodes` of them, or from `span[0]` to `span[1]` if the job is elastic."""

    def __init__(
        self, env: Mapping[str, str], nodes: int | None, span: tuple[int, int] | None
    ) -> None:
        self.all = hosts.of_job(env)
        self.dead: set[str] = set()  # they do not answer
        self.most = len(self.all) if nodes is None else nodes
        least, self.wanted = span or (self.most, self.most)
        self.fewest = span[0] if span else None  # of all hosts; a step may use self.least
        self.least = min(least, self.most)
        self.job, self._has_groups = env["SLURM_JOB_ID"], "SLURM_HET_SIZE" in env

    @property
    def may_change(self) -> bool:
        """True if the step can run without one of them."""
        return self.least < len(self.all)

    @property
    def lacking(self) -> int:
        """The number of further hosts that the job may have."""
        return max(0, self.wanted - len(self.all) + len(self.dead))

    def choose(self, suspects: Sequence[str] = (), bad: Sequence[str] = ()) -> list[str]:
        """Choose hosts for the next step, if alive the same, bad ones last; or NoSpareError."""
        if self._has_groups:
            raise NoSpareError(suspects, "groups of nodes start again together")
        self.dead |= _silent(self.job, [host for host in suspects if host not in self.dead])
        alive = [host for host in self.all if host not in self.dead]
        if len(alive) < self.least:
            raise NoSpareError(sorted(self.dead))
        good = [host for host in alive if host not in bad]
        most = min(self.most, max(self.least, len(good)))
        chosen = sorted(alive, key=lambda host: host in bad)[:most]
        return sorted(chosen, key=self.all.index)


def on(step: Sequence[str], command: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """Return the step, in which srun starts a command, for these hosts."""
    # An earlier step may still hold them: without --overlap the new one would wait for its end.
    # --mem=0 asks for all the memory that the job has.
    place = [f"--nodelist={','.join(chosen)}", "--overlap", "--mem=0"]
    counts = {"--nodes": f"--nodes={len(chosen)}", "--ntasks": f"--ntasks={len(chosen)}"}
    given = (counts.get(word.partition("=")[0], word) for word in step[1 : -len(command)])
    return [step[0], *place, *given, *command]


def probe(job: str, host: str) -> subprocess.Popen[bytes]:
    """Start a process on a host of the job; it exits with 0 only if the host is alive."""
    null = subprocess.DEVNULL
    return subprocess.Popen([*slurm.step(job, [host]), "true"], stdout=null, stderr=null)


def _silent(job: str, suspects: Sequence[str]) -> set[str]:
    asked = {host: probe(job, host) for host in suspects}
    end = time.monotonic() + ANSWER
    found = set()
    for host, process in asked.items():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
        if process.poll() != 0:
            found.add(host)
            process.kill()
            process.wait()
    return found


def bad_hosts(job: str, hosts: Sequence[str], run: RunDir) -> dict[str, str]:
    """Return the hosts that fail the quick checks; raise OSError or SlurmError without answers.

    Later jobs avoid a host only for what load cannot cause: their preflight finds the rest again.
    """
    root = run.path.parent
    with nodes.result_directory(run.job) as into:
        words = nodes.doctor(root, "--quick", f"--into={into}")
        command = [*slurm.step(job, hosts), "--kill-on-bad-exit=0", "--wait=0", *words]
        answers = nodes.ask([command], into, hosts, nodes.PREFLIGHT)
    silent = [host for host in hosts if [*answers[host]] == ["python"]]
    if len(silent) == len(hosts):
        raise OSError("no host answers")
    for host, reason in bad_nodes(answers, lasting=True).items():
        remember(run, host, reason)
    bad, first = bad_nodes(answers), answers[hosts[0]].get("all-reduce")
    if not bad and first and first.state == "bad":  # no single host is the cause
        print(f"batch: the hosts fail in an all-reduce: {first.text}", file=sys.stderr, flush=True)
    return bad


def remember(run: RunDir, host: str, reason: str) -> None:
    """Keep a report about a host for the user's later jobs."""
    name = os.environ.get("SLURM_CLUSTER_NAME", "")
    # The home may be read-only, full or unknown.
    with contextlib.suppress(OSError, RuntimeError):
        NodeReport(time.time(), name, host, reason, str(run.path)).keep()


class Expansion:
    """The further hosts that an elastic job could use while its step runs.

    Lost hosts that still belong to the job are tried again. For other hosts, Slurm is asked whether
    enough would be free at once; to get those, the job must be requeued.
    """

    def __init__(self, run: RunDir, job: str, hosts: Hosts) -> None:
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
        self._probes = {host: probe(self._hosts.job, host) for host in missing}
        if self._hosts.lacking and self._may_requeue and self._question is None:
            try:
                self._question = cluster.ask_for_nodes(self._script, self._hosts.lacking)
            except slurm.SlurmError:  # no sbatch on the nodes
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
