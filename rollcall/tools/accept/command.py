"""`rollcall accept`: check a machine or an allocation before you trust it with a run.

One job checks the machine, the network, every strategy against one process, a kill and a resume,
exact mode, memory and the overhead of a step. It writes accept.md and accept.json in the run
directory. Takes the options of `submit`; after `--`: --only, --device and key=value words.

Exit code: 0 if nothing failed, 1 if something did.
"""

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rollcall.launch.commands import network
from rollcall.launch.runs import root_cause
from rollcall.messages.refusal import refuse
from rollcall.records.run_dir import RunDir
from rollcall.tools.accept import page, request

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
    parsed = network.read("accept", given, "--only", "--device", "key=value")
    options = parsed[0].own
    options.name = options.name or f"accept-{time.strftime('%Y%m%d-%H%M%S')}"
    run = RunDir(options.root, options.name)
    folder = run.path / "accept"
    if run.path.exists():
        page_of_it = f", with its page in {folder}.md" if Path(f"{folder}.md").exists() else ""
        return refuse(f"{run.path} exists{page_of_it}; choose another --name for a new page")
    typed = shlex.join(["rollcall", "accept", *argv])
    code = network.submit(parsed, given, "rollcall.tools.accept.checks", str(folder), typed, *words)
    if not folder.exists():  # refused, or shown by --dry-run
        return code
    written = page.read(folder)
    if code:
        cause = root_cause.of_newest(run).what
        ended = [row for row in written.rows if row.state == "began"]
        written.rows = [row for row in written.rows if row.state != "began"]
        rows = ended or [page.Row("the job", "failed")]
        written.rows += [replace(row, state="failed", seconds=0, text=cause) for row in rows]
        written.write(folder)
    print(f"\n{written.markdown()}\nwritten: {folder}.md and {folder}.json", file=sys.stdout)
    return int(written.failed)
