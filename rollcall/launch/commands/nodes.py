"""`rollcall nodes`: list the nodes that failed in your jobs, when and why.

`submit --preflight` avoids them. A report counts for a week.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

from rollcall.cli.parser import parser as command_parser
from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import clock, listed, table
from rollcall.records.nodes import NodeReport


def main(argv: Sequence[str]) -> int:
    """List or forget reports; return the exit code."""
    parser = command_parser("nodes", __doc__)
    forget = "forget the reports of these nodes, or of all"
    parser.add_argument("--forget", nargs="*", metavar="HOST", help=forget)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    reports = NodeReport.current()
    if options.forget is not None:
        hosts = sorted({report.host for report in reports})
        if unknown := sorted({*options.forget} - {*hosts}):
            raise RefusedError(
                f"--forget {unknown[0]}: no report names this node; the reports name "
                f"{listed(hosts) or 'none'}"
            )
        for report in {(report.cluster, report.host): report for report in reports}.values():
            if not options.forget or report.host in options.forget:
                replace(report, time=time.time(), reason="").keep()
        return 0
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=1))
        return 0
    rows = [("node", "cluster", "when", "why")]
    times = Counter((report.cluster, report.host) for report in reports)
    newest = {(report.cluster, report.host): report for report in reports}
    for key, report in newest.items():
        more = f" ({times[key]} reports, this is the newest)" if times[key] > 1 else ""
        rows.append((report.host, report.cluster, clock(report.time)[:16], report.reason + more))
    print("\n".join(table(rows)) if reports else "no node has failed in your jobs")
    return 0
