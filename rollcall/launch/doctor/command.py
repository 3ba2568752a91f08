"""`rollcall doctor`: check this machine before it trains. `submit --doctor` checks nodes of a job.

Exit code: 0 if nothing is bad, 1 if something is.
"""

import argparse
import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rollcall.cli.parser import parser as command_parser
from rollcall.launch.doctor.check import LocalNode
from rollcall.launch.doctor.checkup import LATE, Outlier, Results, checks, compare, examine
from rollcall.messages.text import listed, table
from rollcall.system import hosts
from rollcall.system.files import write_atomic
from rollcall.system.process import leave


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
    of_job = hosts.expand(os.environ.get("SLURM_JOB_NODELIST", ""))
    node = LocalNode(options.root.absolute(), options.python, of_job, os.environ)
    node.meeting = options.into
    results = {name: examine(node, options.quick)}
    if options.into:
        fields = {check: list(result) for check, result in results[name].items()}
        write_atomic(options.into / f"{name}.json", json.dumps(fields))
        leave(0)  # a check that hangs must not keep the job
    if options.json:
        print(as_json(results))
    else:
        print("\n".join(lines(results, options.all)))
    return int(is_bad(results))


def lines(nodes: Mapping[str, Results], shows_all: bool) -> Iterator[str]:
    """Yield a table of problems and outliers, with `shows_all` of all checks, and the remedies."""
    outliers = compare(nodes)
    rows, remedies = [("check", "result", "where", "found")], []
    for name, check in checks().items():
        problems = list(_rows(name, nodes, outliers.get(name, []), shows_all))
        rows += problems
        wrong = [text for _, result, _, text in problems if result not in ("ok", "not applicable")]
        if not all(text.startswith(LATE) for text in wrong):
            source = re.sub(r"\[.+?\]\((.+?)\)", r"\1", check.source)
            remedies.append(f"{name}: {check.why}. Do this: {check.remedy} [{source}]")
    yield from table(rows) if len(rows) > 1 else []
    yield from ["", *remedies] if remedies else []
    states = [result.state for results in nodes.values() for result in results.values()]
    counts = {state: states.count(state) for state in ("ok", "warning", "bad", "not applicable")}
    summary = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    where = f"{len(nodes)} nodes" if len(nodes) > 1 else next(iter(nodes), "no node")
    yield f"{where}: {summary}" + (f"; nodes differ in {listed([*outliers])}" if outliers else "")


def _rows(
    name: str, nodes: Mapping[str, Results], outliers: list[Outlier], shows_all: bool
) -> Iterator[tuple[str, str, str, str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    by_node = {outlier.node: outlier for outlier in outliers}
    for node, results in nodes.items():
        if name not in results:
            continue
        state, text = str(results[name].state), results[name].text
        is_problem = state in ("warning", "bad")
        if outlier := by_node.get(node):
            state, text = (f"{state}, odd", text) if is_problem else ("odd", outlier.has)
            text += f"; others: {outlier.usual}"
        if is_problem or outlier or shows_all:
            groups.setdefault((state, text), []).append(node)
    for (state, text), where in groups.items():
        yield name, state, "all" if len(where) == len(nodes) else listed(where, 4), text


def as_json(nodes: Mapping[str, Results]) -> str:
    """Return the results and the outliers of all nodes as JSON."""
    results = {
        node: {name: result._asdict() for name, result in of_node.items()}
        for node, of_node in nodes.items()
    }
    odd = {name: [outlier._asdict() for outlier in few] for name, few in compare(nodes).items()}
    return json.dumps({"nodes": results, "odd": odd}, indent=1)


def is_bad(nodes: Mapping[str, Results]) -> bool:
    """Return True if something is broken, or a node differs from the others."""
    states = {result.state for results in nodes.values() for result in results.values()}
    return "bad" in states or bool(compare(nodes))
