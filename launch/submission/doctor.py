"""`submit --doctor`: check every node that a job would get, and print one table."""

import functools
import shlex

from rollcall.launch.doctor import nodes, report
from rollcall.launch.doctor.check import THOROUGH
from rollcall.launch.scheduler.job import Job, options
from rollcall.launch.submission import executors
from rollcall.launch.submission.submission import Submission, note

NOT_OF_SRUN = ("output", "open-mode", "requeue", "no-requeue", "no-kill", "signal", "mail-type")
"""Options of a job script that a waiting srun does not take or need."""
WAITING = 24 * 3600.0
"""Seconds for which the nodes may be in use by others."""


def main(submission: Submission, local: bool, as_json: bool) -> int:
    """Check the nodes; return 0 if all are well and equal, else 1."""
    job, root = submission.job, submission.run.path.parent
    executors.clear_inherited_environment()
    with nodes.meeting_place(root) as into:
        python = [f"--python={job.python[0]}"] if job.python else []
        words = functools.partial(nodes.doctor, root, f"--into={into}", *python)
        count = job.nodes + job.spares
        if local:
            commands = [words(f"--as-node=node-{number}") for number in range(count)]
            found = nodes.ask(commands, into, count, THOROUGH + 15)
        else:
            if not job.allocation:
                note(f"waiting until {count} nodes are free for the doctor")
            found = nodes.ask([_srun(job, words())], into, count, WAITING)
    print(report.as_json(found) if as_json else "\n".join(report.lines(found, shows_all=False)))
    return int(report.is_bad(found))


def _srun(job: Job, words: list[str]) -> list[str]:
    """Return the command that starts the doctor once on each node, as the job would start."""
    count = job.nodes + job.spares
    place = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--wait=0"]
    if job.allocation:
        asked = [f"--jobid={job.allocation}", "--overlap", "--cpus-per-task=1"]
    else:
        given = [it for it in options(job) if it.partition("=")[0] not in NOT_OF_SRUN]
        asked = [word for option in given for word in shlex.split(f"--{option}")]
    return ["srun", *asked, *place, *job.srun, *nodes.step(job.setup, words)]
