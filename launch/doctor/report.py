"""Print what nodes found, as a table or as JSON."""

import json
import re
from collections.abc import Iterator, Mapping

from rollcall.launch.doctor.checkup import Odd, Results, checks, compare
from rollcall.text import listed, table

PROBLEMS = ("warning", "bad")


def lines(nodes: Mapping[str, Results], shows_all: bool) -> Iterator[str]:
    """Yield a table with a row for each problem and each odd node, with what to do."""
    odd = compare(nodes)
    rows, cures = [("check", "result", "where", "found")], []
    for name, check in checks().items():
        problems = list(_rows(name, nodes, odd.get(name, []), shows_all))
        rows += problems
        if any(result not in ("ok", "not applicable") for _, result, *_ in problems):
            source = re.sub(r"\[.+?\]\((.+?)\)", r"\1", check.source)
            cures.append(f"{name}: {check.why}. Do this: {check.cure} [{source}]")
    yield from table(rows) if len(rows) > 1 else []
    yield from ["", *cures] if cures else []
    states = [found.state for results in nodes.values() for found in results.values()]
    counts = {state: states.count(state) for state in ("ok", "warning", "bad", "not applicable")}
    said = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    where = f"{len(nodes)} nodes" if len(nodes) > 1 else next(iter(nodes), "no node")
    yield f"{where}: {said}" + (f"; nodes differ in {len(odd)} checks" if odd else "")


def _rows(
    name: str, nodes: Mapping[str, Results], odd: list[Odd], shows_all: bool
) -> Iterator[tuple[str, str, str, str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    differs = {each.node: each for each in odd}
    for node, results in nodes.items():
        found = results.get(name)
        if found is None:
            continue
        result, text = str(found.state), found.text
        if each := differs.get(node):
            result, text = (f"{result}, odd", text) if result in PROBLEMS else ("odd", each.has)
            text += f"; others: {each.usual}"
        if found.state in PROBLEMS or node in differs or shows_all:
            groups.setdefault((result, text), []).append(node)
    for (result, text), where in groups.items():
        yield name, result, "all" if len(where) == len(nodes) else listed(where, 4), text


def as_json(nodes: Mapping[str, Results]) -> str:
    """Return the results of all nodes, and what differs, as JSON."""
    found = {it: {name: each._asdict() for name, each in of.items()} for it, of in nodes.items()}
    odd = {name: [each._asdict() for each in them] for name, them in compare(nodes).items()}
    return json.dumps({"nodes": found, "odd": odd}, indent=1)


def is_bad(nodes: Mapping[str, Results]) -> bool:
    """Whether something is broken, or a node differs from the others."""
    states = {found.state for results in nodes.values() for found in results.values()}
    return "bad" in states or bool(compare(nodes))
