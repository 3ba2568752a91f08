"""Run all checks of one node, and compare the results of several."""

import threading
import time
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rollcall.launch.doctor import fabric, gpu, limits, links, peers, software, storage
from rollcall.launch.doctor.check import QUICK, THOROUGH, LocalNode, Result, Skip, ToolError
from rollcall.messages.text import listed, table_in

Results = dict[str, Result]
"""The results of a node by the name of the check."""
LATE = "did not finish"


class Check(NamedTuple):
    """A line of `table.md`, and the function of this name."""

    name: str
    is_quick: bool
    what: str
    why: str
    remedy: str
    source: str
    run: Callable[[LocalNode], Result]


class Outlier(NamedTuple):
    """A node whose value differs from the value of most nodes."""

    node: str
    has: str
    usual: str


@cache
def checks() -> dict[str, Check]:
    """Return all checks by name, in the order of the table."""
    modules = (limits, links, peers, storage, gpu, fabric, software)
    functions = ChainMap(gpu.FIELD_CHECKS, *map(vars, modules))
    table = {}
    rows = table_in(Path(__file__).with_name("table.md"))
    for name, quick, what, why, remedy, source in rows:
        function = functions[name.replace("-", "_")]
        table[name] = Check(name, quick == "yes", what, why, remedy, source, function)
    return table


def examine(node: LocalNode, is_quick: bool) -> Results:
    """Run the checks at the same time; a check that does not end in time is bad."""
    chosen = [check for check in checks().values() if check.is_quick or not is_quick]
    limit = QUICK if is_quick else THOROUGH
    threads: list[threading.Thread] = []
    late = Result("bad", f"{LATE} within {limit:.0f} s: it hangs, or the machine is busy")
    results = {check.name: late for check in chosen}

    def work(check: Check) -> None:
        results[check.name] = _safely(check, node)

    begin = time.monotonic()
    for quick in (True, False):  # one after the other: the import of torch keeps the CPUs busy
        for check in chosen:
            if check.is_quick == quick:
                threads.append(threading.Thread(target=work, args=[check], daemon=True))
                threads[-1].start()
        end = begin + (QUICK if quick else limit)
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
    node.stop()
    return dict(results)


def _safely(check: Check, node: LocalNode) -> Result:
    try:
        return check.run(node)
    except Skip as reason:
        return Result("not applicable", str(reason))
    except (ToolError, OSError) as error:
        return Result("bad", str(error))
    except Exception as error:  # a check must not end the others
        return Result("warning", f"the check failed: {type(error).__name__}: {error}")


def compare(nodes: Mapping[str, Results]) -> dict[str, list[Outlier]]:
    """Return, by check, the nodes whose values differ from most nodes' values; of two, both."""
    outliers: dict[str, Iterator[Outlier]] = {}
    for name in checks():
        results = {node: of_node[name] for node, of_node in nodes.items() if name in of_node}
        values = {node: result.value for node, result in results.items()}
        values = {node: value for node, value in values.items() if value is not None}
        if all(isinstance(value, int | float) for value in values.values()):
            outliers[name] = _far_from_others(results, values)
        elif all(isinstance(value, dict) for value in values.values()):
            outliers[name] = _unusual_keys(values)
        else:
            outliers[name] = _unusual({node: str(value) for node, value in values.items()})
    return {name: few for name, of_check in outliers.items() if (few := list(of_check))}


def _far_from_others(results: Mapping[str, Result], values: Mapping[str, Any]) -> Iterator[Outlier]:
    middle = median(values.values()) if values else 0.0
    share = 0.5 if len(values) == 2 else 1.0  # the median of two lies between them
    for node, value in values.items():
        if abs(value - middle) > share * results[node].within:
            others = (other for other in values if other != node)
            usual = min(others, key=lambda other: abs(values[other] - middle))
            yield Outlier(node, results[node].text, results[usual].text)


def _unusual_keys(values: Mapping[str, Any]) -> Iterator[Outlier]:
    differing: dict[str, list[Outlier]] = {}
    for key in sorted(set().union(*values.values())):
        texts = {node: str(value.get(key, "absent")) for node, value in values.items()}
        for outlier in _unusual(texts):
            named = outlier._replace(has=f"{key} {outlier.has}")
            differing.setdefault(outlier.node, []).append(named)
    for node, outliers in differing.items():
        usual = ", ".join(outlier.usual for outlier in outliers[:3])
        yield Outlier(node, listed([outlier.has for outlier in outliers], 3), usual)


def _unusual(values: Mapping[str, str]) -> Iterator[Outlier]:
    counts = Counter(values.values()).most_common(2)
    is_even = len(counts) == 2 and counts[0][1] == 1  # all differ: none of them is usual
    for node, value in values.items():
        if value != counts[0][0]:
            yield Outlier(node, value, counts[0][0])
        elif is_even:
            yield Outlier(node, value, counts[1][0])


def bad_nodes(nodes: Mapping[str, Results], *, lasting: bool = False) -> dict[str, str]:
    """Return the nodes that a job should avoid, with reasons: they fail a check, or differ.

    A problem of more than half of the nodes belongs to the environment. `lasting` leaves out what
    load alone can cause: a late check, or nodes that do not meet.
    """
    reasons: dict[str, list[str]] = {}
    for name in checks():
        if lasting and name in MEETINGS:
            continue
        results = {node: of_node[name] for node, of_node in nodes.items() if name in of_node}
        bad = {node: result.text for node, result in results.items() if result.state == "bad"}
        for node, text in bad.items() if 2 * len(bad) <= len(nodes) else ():
            if not (lasting and text.startswith(LATE)):
                reasons.setdefault(node, []).append(f"{name}: {text}")
    for name, outliers in compare(nodes).items():
        if name in MUST_MATCH and 2 * len(outliers) < len(nodes):
            for node, has, usual in outliers:
                reasons.setdefault(node, []).append(f"{name}: {has}, others {usual}")
    return {node: "; ".join(texts[:3]) for node, texts in reasons.items()}


MEETINGS = {"connections", "all-reduce", "python"}
"""Checks in which a node answers others within seconds; a silent node fails the check `python`."""
MUST_MATCH = {"code", "packages", "python", "mtu", "link-speed"}
MUST_MATCH |= {"gpu-count", "gpu-model", "driver", "pcie", "nvlink"}
"""Checks whose differences alone are a reason to avoid a node."""
