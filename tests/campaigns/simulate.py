"""Simulate jobs with random faults, and look for broken invariants.

    PYTHONPATH=.:tests/simulation python tests/campaigns/simulate.py --seeds 1000 --nodes 2-6
    PYTHONPATH=.:tests/simulation python tests/campaigns/simulate.py --growth 16,100,1000

The first command runs the launcher's own code on simulated hosts, once for each seed, and prints
the story of each seed that breaks an invariant; the same seed repeats it. The second one prints how
the load of the shared file system and the time until a dead node is noticed grow with the nodes.
The exit code is 1 if an invariant was broken.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

import simulation
from simulated_hosts import Fault

from rollcall.tools.bench import turns


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, metavar="N")
    parser.add_argument("--first", type=int, default=0, help="the first seed", metavar="SEED")
    parser.add_argument("--nodes", default="2-5", metavar="MIN-MAX")
    parser.add_argument("--growth", metavar="NODES,…", help="count operations instead")
    options = parser.parse_args(argv)
    if options.growth:
        return growth([int(word) for word in options.growth.split(",")])
    fewest, most = (int(word) for word in options.nodes.split("-"))
    began, broken, ends, events = time.process_time(), 0, Counter[str](), 0
    for seed in range(options.first, options.first + options.seeds):
        result = simulation.simulate(seed, fewest, most)
        ends[result.end or "no verdict"] += 1
        events += result.events
        if result.broken:
            broken += 1
            print(*result.story, "", sep="\n", flush=True)
    how = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    took = time.process_time() - began
    print(f"{options.seeds} seeds, {events} events, {took:.0f} s: {how}; {broken} broken")
    return int(broken > 0)


def growth(sizes: Sequence[int]) -> int:
    """Print the operations of a node and second, and the time until a dead node is noticed."""
    rows = [["nodes", "start", "quiet", "quiet, head", "failure", "end", "noticed after"]]
    is_broken = False
    for nodes in sizes:
        calm = _scenario(nodes, [])
        result = simulation.Simulation(calm).go()
        failed = _scenario(nodes, [Fault(60.0, "raise", nodes // 2, "", rank=0)])
        crashed = simulation.Simulation(failed).go()
        lost = _scenario(nodes, [Fault(60.0, "power-off", nodes - 1, "")], steps=400)
        died = simulation.Simulation(lost).go()
        is_broken |= any(part.broken for part in (result, crashed, died))
        for part in (result, crashed, died):
            print(*part.broken, sep="\n", file=sys.stderr)
        spans = [(0, 20), (40, 60), (40, 60), (60, 80), (calm_end(result), 10**9)]
        parts = (result, result, result, crashed, result)
        cells = [str(nodes)]
        for at, (part, (begin, end)) in enumerate(zip(parts, spans, strict=True)):
            hosts = {0} if at == 2 else None
            total = sum(
                count
                for (second, host, call), count in part.operations.items()
                if begin <= second < end
                and call not in ("read", "write")
                and host >= 0
                and (hosts is None or host in hosts)
            )
            per = 1 if hosts else nodes
            length = min(end, int(part.seconds)) - begin if at in (1, 2) else 1
            cells.append(f"{total / per / length:.1f}")
        cells.append(f"{min(died.noticed, default=0):.1f} s")
        rows.append(cells)
    turns.show("operations on the shared file system", rows)
    return int(is_broken)


def calm_end(result: simulation.Result) -> int:
    """Return the second in which the ranks of a run without faults have ended."""
    return int(result.seconds - 30.0 - 6.0)


def _scenario(nodes: int, faults: list[Fault], steps: int = 140) -> simulation.Scenario:
    return simulation.Scenario(1, nodes, 0, None, steps, faults, latency=0.001)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
