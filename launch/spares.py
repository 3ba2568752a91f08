"""On which hosts of the job can its step start again, when some of them have been lost?"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

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
        super().__init__(f"{', '.join(dead)} cannot be reached and there is no spare node")
        self.dead = tuple(dead)


def choose(
    step: Sequence[str], env: Mapping[str, str], suspects: Sequence[str], dead: Sequence[str]
) -> list[str]:
    """The hosts for the next step; those of the last one where they live.

    Args:
        step: srun and its words, which say how many hosts it needs if not all of the job's.
        env: of the job's script.
        suspects: hosts whose supervisor is silent; are they themselves?
        dead: hosts that are known to be.

    Raises:
        NoSpareError: too few are left.
    """
    job = hosts.expand(env["SLURM_JOB_NODELIST"])
    wanted = next((int(m[1]) for word in step if (m := re.fullmatch(r"--nodes=(\d+)", word))), 0)
    gone = {*dead, *(host for host in suspects if not _answers(env["SLURM_JOB_ID"], host))}
    alive = [host for host in job if host not in gone]
    if len(alive) < (wanted or len(job)):
        raise NoSpareError(sorted(gone))
    return alive[: wanted or len(job)]


def on(step: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """The step's words for these hosts, although an earlier step may still hold them."""
    # Without --overlap it would wait for that one's end; --mem=0 asks for what the job has.
    place = [f"--nodelist={','.join(chosen)}", "--overlap", "--mem=0"]
    return [step[0], *place, *step[1:]]


def _answers(job: str, host: str) -> bool:
    try:
        probe = [*slurm.step(job, [host]), "true"]
        done = subprocess.run(probe, capture_output=True, timeout=ANSWER, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
