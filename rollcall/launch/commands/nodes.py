"""`rollcall nodes`: list the nodes that failed in your jobs, when and why.

`submit --preflight` avoids them. A report counts for a week.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from rollcall.cli.parser import parser as command_parser
from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import clock, listed, table
from rollcall.records.nodes import NodeReport


def main(argv: Sequence[str]) -> int:
    """List or forget reports; return the exit code."""
    parser = command_parser("nodes", __doc__)
    forget = "forget the reports of these nodes, or of all"
    parser.add_argument("--forget", nargs="*", metavar="HOST", help=forget)
    options = parser.parse_args(argv)
    newest = {(report.cluster, report.host): report for report in NodeReport.current()}
    if options.forget is not None:
        hosts = sorted({host for _, host in newest})
        if unknown := sorted({*options.forget} - {*hosts}):
            advice = f"the reports name {listed(hosts) or 'none'}"
            raise RefusedError(f"--forget {unknown[0]}: no report names this node; {advice}")
        for report in newest.values():
            if not options.forget or report.host in options.forget:
                replace(report, time=time.time(), reason="").keep()
        return 0
    rows = [("node", "cluster", "when", "why")]
    for report in newest.values():
        rows.append((report.host, report.cluster, clock(report.time)[:16], report.reason))
    print("\n".join(table(rows)) if newest else "no node has failed in your jobs")
    return 0
