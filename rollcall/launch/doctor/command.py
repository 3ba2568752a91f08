"""`rollcall doctor`: check this machine before it trains. `submit --doctor` checks nodes of a job.

Exit code: 0 if nothing is bad, 1 if something is.
"""

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rollcall.cli.parser import parser as command_parser
from rollcall.launch.doctor import report
from rollcall.launch.doctor.check import LocalNode
from rollcall.launch.doctor.checkup import examine
from rollcall.system import hosts
from rollcall.system.files import write_atomic
from rollcall.system.process import leave

MARK = "rollcall-doctor"
"""The first word of the lines by which a node reports its clock."""


def main(argv: Sequence[str]) -> int:
    """Check this machine; return the exit code."""
    parser = command_parser("doctor", __doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="only the checks that take no more than seconds")
    add("--all", action="store_true", help="also list the checks that pass or do not apply")
    add("--json", action="store_true", help="print JSON")
    root = "directory of the runs (default: runs)"
    add("--root", type=Path, default=Path("runs"), metavar="DIR", help=root)
    python = "interpreter of the ranks (default: this one)"
    add("--python", default=sys.executable, metavar="PATH", help=python)
    add("--into", type=Path, help=argparse.SUPPRESS)  # for the nodes of a job
    add("--as-node", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    name = options.as_node or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    if options.into:
        _say_time(name)
    of_job = hosts.expand(os.environ.get("SLURM_JOB_NODELIST", ""))
    node = LocalNode(options.root.absolute(), options.python, of_job, os.environ)
    node.meeting = options.into
    results = {name: examine(node, options.quick)}
    if options.into:
        fields = {check: list(result) for check, result in results[name].items()}
        write_atomic(options.into / f"{name}.json", json.dumps(fields))
        _say_time(name)
        leave(0)  # a check that hangs must not keep the job
    if options.json:
        print(report.as_json(results))
    else:
        print("\n".join(report.lines(results, options.all)))
    return int(report.is_bad(results))


def _say_time(name: str) -> None:
    print(f"{MARK} {name} {time.time()!r}", flush=True)
