"""`rollcall nodes`: list the nodes that failed in your jobs, when and why.

`submit --preflight` avoids them. A report counts for a week.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from rollcall.parser import parser as command_parser
from rollcall.records.nodes import NodeReport
from rollcall.refusal import RefusedError
from rollcall.text import listed, table


def main(argv: Sequence[str]) -> int:
    """List or forget reports; return the exit code."""
    parser = command_parser("nodes", __doc__)
    forget = "forget what is known of these nodes, or of all"
    parser.add_argument("--forget", nargs="*", metavar="HOST", help=forget)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    reports = NodeReport.current()
    if options.forget is not None:
        hosts = {report.host for report in reports}
        if unknown := sorted({*options.forget} - hosts):
            known = f"known are {listed(sorted(hosts))}" if hosts else "nothing is known of any"
            raise RefusedError(f"--forget {unknown[0]}: no report names this node; {known}")
        for report in {(it.cluster, it.host): it for it in reports}.values():
            if not options.forget or report.host in options.forget:
                replace(report, time=time.time(), reason="").keep()
        return 0
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=1))
        return 0
    rows = [("node", "cluster", "when", "why")]
    for it in reports:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(it.time))
        rows.append((it.host, it.cluster, when, it.reason))
    print("\n".join(table(rows)) if reports else "no node has failed in your jobs")
    return 0
