"""`python -m launch attach RUN --node 1 [CMD …]`: a command, or a shell, on a node of a live run.

It sees what the job sees: its GPUs, its /tmp, its limits. A run on this machine has nothing to
enter: the command just runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from launch import runs, slurm, states
from launch.runs import NoRunError
from launch.slurm import SlurmError


def main(argv: Sequence[str]) -> int:
    """Become the command; return the exit code only if that cannot be."""
    parser = runs.parser("attach", __doc__, nargs=argparse.REMAINDER)
    parser.add_argument("--node", type=int, default=0, metavar="N", help="which one (default: 0)")
    options = parser.parse_args(argv)
    if not options.run:
        parser.error("the name of a run is missing")
    name, *rest = options.run
    # Everything from RUN on is in `rest`: the options before the command are ours still.
    options = parser.parse_args(rest, options)
    command = options.run[options.run[:1] == ["--"] :] or ["bash"]
    try:
        run = runs.find(name, options.root)
        job, attempt = states.live_attempt(run)
        if not 0 <= options.node < len(attempt.hosts):
            last = len(attempt.hosts) - 1
            raise NoRunError(f"--node {options.node}: run {run.name} has nodes 0 to {last}")
        if not job.is_local:
            terminal = ["--pty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
            command = [*slurm.step(job.id, [attempt.hosts[options.node]]), *terminal, *command]
    except (NoRunError, SlurmError) as error:
        return runs.refuse("attach", error)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        return runs.refuse("attach", f"{command[0]}: {error.strerror}")
