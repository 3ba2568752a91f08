"""On which hosts of the job can its step run, when some of them have been lost?"""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from itertools import takewhile

from launch import slurm
from train import hosts

ANSWER = 5.0
"""Seconds in which a host that lives starts a process."""


class NoSpareError(Exception):
    """Too few hosts are left.

    Attributes:
        dead: the hosts that do not answer.
    """

    def __init__(self, dead: Sequence[str]) -> None:
        super().__init__(f"cannot reach {', '.join(dead)}: it has too few nodes left")
        self.dead = tuple(dead)


class Hosts:
    """A job's hosts.

    Attributes:
        all: what the job was given.
        dead: those that do not answer.
        most, least: on how many of them its step may run.
        wanted: how many hosts the job may have.
        job: the number of the job, as srun takes it.
    """

    def __init__(
        self, step: Sequence[str], env: Mapping[str, str], span: tuple[int, int] | None
    ) -> None:
        """All are taken to live.

        Args:
            step: srun and its words, which say how many hosts it needs if not all of the job's.
            env: of the job's script.
            span: the least and the most hosts of an elastic job.
        """
        self.all = hosts.expand(env["SLURM_JOB_NODELIST"])
        self.dead: set[str] = set()
        asked = (re.fullmatch(r"--nodes=(\d+)", word) for word in _options(step))
        self.most = next((int(match[1]) for match in asked if match), len(self.all))
        least, self.wanted = span or (self.most, self.most)
        self.least = min(least, self.most)
        self.job = env["SLURM_JOB_ID"]

    @property
    def may_change(self) -> bool:
        """Whether the step can do without one of them."""
        return self.least < len(self.all)

    @property
    def lacking(self) -> int:
        """How many hosts fewer the job has than it may have."""
        return max(0, self.wanted - len(self.all) + len(self.dead))

    def choose(self, suspects: Sequence[str] = (), bad: Sequence[str] = ()) -> list[str]:
        """The hosts for the next step; those of the last one where they live.

        Args:
            suspects: hosts whose supervisor is silent; are they themselves?
            bad: hosts that are taken only if there are no others.

        Raises:
            NoSpareError: too few are left.
        """
        self.dead |= _silent(self.job, [host for host in suspects if host not in self.dead])
        alive = [host for host in self.all if host not in self.dead]
        if len(alive) < self.least:
            raise NoSpareError(sorted(self.dead))
        chosen = sorted(alive, key=lambda host: host in bad)[: self.most]
        return sorted(chosen, key=self.all.index)


def on(step: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """The step's words for these hosts, although an earlier step may still hold them."""
    # Without --overlap it would wait for that one's end; --mem=0 asks for what the job has.
    place = [f"--nodelist={','.join(chosen)}", "--overlap", "--mem=0"]
    given = _options(step)
    count = (re.sub(r"^(--nodes|--ntasks)=\d+$", rf"\1={len(chosen)}", word) for word in given)
    return [step[0], *place, *count, *step[1 + len(given) :]]


def _options(step: Sequence[str]) -> list[str]:
    """srun's own words, without those of the command that it starts."""
    return list(takewhile(lambda word: word.startswith("-"), step[1:]))


def probe(job: str, host: str) -> subprocess.Popen[bytes]:
    """Start a process that ends with 0 on a host of the job; it never does where that is dead."""
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
