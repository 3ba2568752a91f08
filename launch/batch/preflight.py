"""Find the bad hosts of a job before its step starts, and remember them for later jobs."""

import contextlib
import os
import time
from collections.abc import Sequence

from rollcall.launch.doctor import nodes
from rollcall.launch.doctor.checkup import bad_nodes
from rollcall.launch.scheduler import slurm
from rollcall.records.nodes import NodeReport
from rollcall.run_dir import RunDir


def bad_hosts(job: str, hosts: Sequence[str], run: RunDir) -> dict[str, str]:
    """Return the hosts that fail the quick checks; raise OSError or SlurmError without answers."""
    root = run.path.parent
    with nodes.meeting_place(run.job) as into:
        words = nodes.doctor(root, "--quick", f"--into={into}")
        command = [*slurm.step(job, hosts), "--kill-on-bad-exit=0", "--wait=0", *words]
        found = nodes.ask([command], into, hosts, nodes.PREFLIGHT)
    silent = [host for host in hosts if [*found[host]] == ["python"]]
    if len(silent) == len(hosts):
        raise OSError("no host answers")
    return bad_nodes(found)


def remember(run: RunDir, host: str, reason: str) -> None:
    """Keep a report about a host for the user's later jobs."""
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
    # The home may be read-only, full or unknown.
    with contextlib.suppress(OSError, RuntimeError):
        NodeReport(time.time(), cluster, host, reason, str(run.path)).keep()
