"""Print what nodes found, as a table or as JSON."""

import json
from collections.abc import Iterator, Mapping

from rollcall.launch.doctor.check import Found
from rollcall.launch.doctor.checkup import Odd, Results, checks, compare
from rollcall.text import listed, table


def lines(nodes: Mapping[str, Results], shows_all: bool) -> Iterator[str]:
    """Yield a table with a row for each problem and each odd node, with what to do."""
    odd = compare(nodes)
    rows, cures = [("check", "result", "where", "found")], []
    for name, check in checks().items():
        problems = list(_rows(name, nodes, odd.get(name, []), shows_all))
        rows += problems
        if any(result not in ("ok", "not applicable") for _, result, *_ in problems):
            cures.append(f"{name}: {check.why}. {check.cure} [{check.source}]")
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
    for node, results in nodes.items():
        found = results.get(name, Found("not applicable", "not part of the quick checks"))
        is_problem = found.state in ("warning", "bad")
        if is_problem or (shows_all and name in results):
            groups.setdefault((found.state, found.text), []).append(node)
    for (state, text), where in groups.items():
        place = "all" if len(where) == len(nodes) else listed(where, 4)
        yield name, state, place, text
    for each in odd:
        yield name, "odd", each.node, f"{each.has}; others: {each.usual}"


def as_json(nodes: Mapping[str, Results]) -> str:
    """Return the results of all nodes, and what differs, as JSON."""
    found = {
        node: {name: found._asdict() for name, found in results.items()}
        for node, results in nodes.items()
    }
    odd = {name: [each._asdict() for each in them] for name, them in compare(nodes).items()}
    return json.dumps({"nodes": found, "odd": odd}, indent=1)


def is_bad(nodes: Mapping[str, Results]) -> bool:
    """Whether something is broken, or a node differs from the others."""
    states = {found.state for results in nodes.values() for found in results.values()}
    return "bad" in states or bool(compare(nodes))
