"""Run all checks of one node, and compare the results of several."""

import threading
import time
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rollcall.launch.doctor import cpu, fabric, gpu, limits, links, software, storage
from rollcall.launch.doctor.check import QUICK, THOROUGH, Failed, Found, Node, Skip
from rollcall.text import listed

Results = dict[str, Found]
"""The results of a node, by the name of the check."""


class Check(NamedTuple):
    """A line of `table.md`, and the function of this name."""

    name: str
    is_quick: bool
    what: str
    why: str
    cure: str
    source: str
    run: Callable[[Node], Found]


class Odd(NamedTuple):
    """A node whose value differs from what most nodes have."""

    node: str
    has: str
    usual: str


@cache
def checks() -> dict[str, Check]:
    """Return all checks by name, in the order of the table."""
    modules = (limits, links, cpu, storage, gpu, fabric, software)
    functions = ChainMap(gpu.EACH, *map(vars, modules))
    found = {}
    for line in Path(__file__).with_name("table.md").read_text().splitlines()[2:]:
        name, quick, what, why, cure, source = (it.strip() for it in line[1:-1].split(" | "))
        run = functions[name.replace("-", "_")]
        found[name] = Check(name, quick == "yes", what, why, cure, source, run)
    return found


def examine(node: Node, is_quick: bool) -> Results:
    """Run the checks at the same time; one that does not end in time is reported as bad."""
    chosen = [check for check in checks().values() if check.is_quick or not is_quick]
    limit = QUICK if is_quick else THOROUGH
    workers: list[threading.Thread] = []
    late = Found("bad", f"no answer within {limit:.0f} s: what it looks at hangs")
    results = {check.name: late for check in chosen}

    def work(check: Check) -> None:
        results[check.name] = _safely(check, node)

    begin = time.monotonic()
    for quick in (True, False):  # one after the other: the import of torch keeps the CPUs busy
        parts = [check for check in chosen if check.is_quick == quick]
        started = [threading.Thread(target=work, args=[check], daemon=True) for check in parts]
        for worker in started:
            worker.start()
        workers += started
        end = begin + (QUICK if quick else limit)
        for worker in workers:
            worker.join(max(0.0, end - time.monotonic()))
    node.stop()
    return dict(results)


def _safely(check: Check, node: Node) -> Found:
    try:
        return check.run(node)
    except Skip as reason:
        return Found("not applicable", str(reason))
    except (Failed, OSError) as error:
        return Found("bad", str(error))
    except Exception as error:  # a check must not end the others
        return Found("warning", f"the check failed: {type(error).__name__}: {error}")


def compare(nodes: Mapping[str, Results]) -> dict[str, list[Odd]]:
    """Return, by check, the nodes whose values differ from most nodes'.

    Two nodes that differ are both listed, because neither of them is usual.
    """
    found = {}
    for name in checks():
        of_name = {it: results[name] for it, results in nodes.items() if name in results}
        values = {it: each.value for it, each in of_name.items() if each.value is not None}
        if all(isinstance(value, int | float) for value in values.values()):
            odd = list(_far_from_others(of_name, values))
        elif all(isinstance(value, dict) for value in values.values()):
            odd = list(_odd_keys(values))
        else:
            odd = list(_odd({it: str(value) for it, value in values.items()}))
        if odd:
            found[name] = odd
    return found


def _far_from_others(found: Mapping[str, Found], values: Mapping[str, Any]) -> Iterator[Odd]:
    middle = median(values.values()) if values else 0.0
    share = 0.5 if len(values) == 2 else 1.0  # the median of two lies between them
    for node, value in values.items():
        if abs(value - middle) > share * found[node].within:
            yield Odd(node, found[node].text, f"{middle:,.1f} at the median")


def _odd_keys(values: Mapping[str, Any]) -> Iterator[Odd]:
    differing: dict[str, list[tuple[str, str]]] = {}
    for key in sorted({key for each in values.values() for key in each}):
        for odd in _odd({node: str(each.get(key, "absent")) for node, each in values.items()}):
            differing.setdefault(odd.node, []).append((f"{key} {odd.has}", odd.usual))
    for node, pairs in differing.items():
        usual = ", ".join(usual for _, usual in pairs[:3])
        yield Odd(node, listed([text for text, _ in pairs], 3), usual)


def _odd(values: Mapping[str, str]) -> Iterator[Odd]:
    counts = Counter(values.values()).most_common(2)
    is_even = len(counts) == 2 and counts[0][1] == 1  # all differ: none of them is usual
    for node, value in values.items():
        if value != counts[0][0]:
            yield Odd(node, value, counts[0][0])
        elif is_even:
            yield Odd(node, value, counts[1][0])


def bad_nodes(nodes: Mapping[str, Results]) -> dict[str, str]:
    """Return the nodes that a job should avoid, and why: they fail what others pass, or differ.

    What is wrong on more than half of them is a matter of the environment.
    """
    reasons: dict[str, list[str]] = {}
    for name in checks():
        bad = [it for it, found in nodes.items() if name in found and found[name].state == "bad"]
        for node in bad if 2 * len(bad) <= len(nodes) else []:
            reasons.setdefault(node, []).append(f"{name}: {nodes[node][name].text}")
    for name, odd in compare(nodes).items():
        if name in MUST_MATCH and 2 * len(odd) < len(nodes):
            for each in odd:
                reasons.setdefault(each.node, []).append(f"{name}: {each.has}, others {each.usual}")
    return {node: "; ".join(texts[:3]) for node, texts in reasons.items()}


MUST_MATCH = {"code", "packages", "python", "mtu", "link-speed"}
MUST_MATCH |= {"gpu-count", "gpu-model", "driver", "pcie", "nvlink"}
"""Checks whose differences alone are a reason to avoid a node."""
