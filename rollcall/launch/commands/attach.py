"""`rollcall attach RUN --node 1 [CMD …]`: run a command, or a shell, on a node of a live run.

The command sees what the job sees: its GPUs, its /tmp, its limits. For a run on this machine, it
simply runs.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from rollcall.launch.runs import find, states
from rollcall.launch.scheduler import slurm
from rollcall.messages.refusal import refusing


def main(argv: Sequence[str]) -> NoReturn:
    """Replace this process by the command."""
    parser = find.parser("attach", __doc__, nargs=argparse.REMAINDER)
    add = parser.add_argument
    add("--node", type=int, default=0, metavar="N", help="number of the node (default: 0)")
    options = parser.parse_args(argv)
    if not options.run:
        parser.error("the name of a run is missing")
    name, *rest = options.run
    # `rest` has everything after RUN; options before the command are still ours.
    options = parser.parse_args(rest, options)
    command = (options.run[1:] if options.run[:1] == ["--"] else options.run) or ["bash"]
    run = find.find_one(name, options.root)
    job, attempt = states.live_attempt(run)
    if not 0 <= options.node < len(attempt.hosts):
        last = len(attempt.hosts) - 1
        raise find.NoRunError(f"--node {options.node}: run {run.name} has nodes 0 to {last}")
    if not job.is_local:
        terminal = ["--pty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
        command = [*slurm.on_groups(job.id, [attempt.hosts[options.node]]), *terminal, *command]
    with refusing(command[0]):
        os.execvp(command[0], command)
