"""`rollcall accept`: check a machine or an allocation before you trust it with a run.

It starts one job that checks the machine, the network, every strategy against one process, a kill
and a resume, exact mode, memory against the plan, and the overhead of a step. It prints one page,
and writes it to accept.md and accept.json in the run directory. Takes the options of
`rollcall submit`; after `--`: --only, --device and key=value words for every training.

Exit code: 0 if nothing failed, 1 if something did.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from rollcall.accept import page, request
from rollcall.launch.commands import network
from rollcall.launch.runs import root_cause
from rollcall.refusal import refuse
from rollcall.run_dir import RunDir

USAGE = "usage: rollcall accept [options of rollcall submit] [-- [--only CHECK,…] [key=value …]]"
RESTARTS = 40
"""More than there are checks: each that ends the ranks needs one."""


def main(argv: Sequence[str]) -> int:
    """Submit the checks, wait for them, and show the page; return the exit code."""
    if {"-h", "--help"} & {*argv}:
        print(f"{USAGE}\n\n{__doc__}")
        return 0
    given, words = network.divided(argv)
    request.read(words)  # refuses a mistake before anything is queued
    given = [f"--max-restarts={RESTARTS}", *given]
    parsed = network.read("accept", given, "--only", "--device")
    own = parsed[0].own
    own.name = own.name or f"accept-{time.strftime('%Y%m%d-%H%M%S')}"
    run = RunDir(own.root, own.name)
    if run.path.exists():
        return refuse(f"{run.path} exists; choose another --name for a new page")
    folder = run.path / "accept"
    code = network.submit(parsed, given, "rollcall.accept.checks", str(folder), *words)
    if not folder.exists():  # refused, or shown by --dry-run
        return code
    title = f"rollcall accept, {time.strftime('%Y-%m-%d')}"
    found = page.read(folder, title)
    found.facts = {"command": f"rollcall accept {' '.join(argv)}".strip(), **found.facts}
    if code:
        cause = root_cause.of_newest(run).what
        ended = [row for row in found.rows if row.state == "began"]
        found.rows = [row for row in found.rows if row.state != "began"]
        rows = ended or [page.Row("the job", "failed")]
        found.rows += [replace(row, state="failed", seconds=0, text=cause) for row in rows]
    found.write(folder)
    print(f"\n{found.markdown()}\nwritten: {folder}.md and {folder}.json", file=sys.stdout)
    return int(found.failed)
