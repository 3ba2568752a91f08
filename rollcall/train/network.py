"""`python -m rollcall.train.network`: how fast the ranks exchange data, and what is slow.

Bus bandwidth is that of nccl-tests (doc/PERFORMANCE.md there): the bytes that each rank must at
least send or receive, per second. Every host then sends to each other one in turns; a slow host is
slow with all others, a slow link with one. `rollcall network` starts this on the nodes of a job.
"""

import argparse
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median, quantiles
from typing import Any

import psutil
import torch
import torch.distributed as dist

from rollcall.cli.parser import parser as command_parser
from rollcall.config import ConfigError
from rollcall.messages.refusal import RefusedError, refuse
from rollcall.messages.text import listed, size, table
from rollcall.system import hosts
from rollcall.system.process import leave
from rollcall.train.ranks.device import synchronize
from rollcall.train.ranks.world import World

REPEATS = 5
LONG = 0.5
"""Seconds; a collective that takes longer is not repeated."""
ALL_PAIRS = 32
"""Up to this many hosts, every pair is measured; beyond, only those 1, 2, 4, … places apart."""
LINK_BYTES = 2**21
"""Bytes from one host to another; of fewer, a busy processor takes longer than a slow link."""
TURNS, MOST_TURNS, TURN_SECONDS = 3, 30, 3.0
"""How often each pair is measured, at least and at most, and the seconds after which that is
enough. The best counts: other work on a host makes a rate smaller, never larger."""
MEASUREMENTS = 3
"""Measurements of all links that must agree before one is named."""
SLOW = 0.35
"""A link or host is slow below this share of the upper quartile: of three hosts, a slow one has
most links."""


def collectives(world: World, count: int) -> dict[str, tuple[float, Callable[[], object]]]:
    """Return each collective on `count` float32 values, and its bus bytes per byte of them."""
    ranks = world.world_size
    whole, other = (torch.zeros(count, device=world.device) for _ in range(2))
    part = torch.zeros(count // ranks, device=world.device)
    share = (ranks - 1) / ranks
    return {
        "all-reduce": (2 * share, lambda: dist.all_reduce(whole)),
        "all-gather": (share, lambda: dist.all_gather_into_tensor(whole, part)),
        "reduce-scatter": (share, lambda: dist.reduce_scatter_tensor(part, whole)),
        "all-to-all": (share, lambda: dist.all_to_all_single(other, whole)),
    }


def seconds(world: World, work: Callable[[], object]) -> float:
    """Return how long a collective takes on the slowest rank."""

    def once(repeats: int) -> float:
        world.barrier()
        begin = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronize(world.device)
        taken = torch.tensor([(time.perf_counter() - begin) / repeats], dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    first = once(1)
    return first if first > LONG else once(REPEATS)


def firsts(local_ranks: Sequence[int]) -> list[int]:
    """Return the first rank of each node, or all ranks of a single node."""
    found = [rank for rank, local in enumerate(local_ranks) if local == 0]
    return found if len(found) > 1 else list(range(len(local_ranks)))


def links(world: World, leaders: Sequence[int]) -> list[list[float]]:
    """Return the bytes per second from each leader (row) to each other one (column).

    In each round all leaders send at the same time, each to the one that many places ahead; the
    rounds take turns. The rate of a pair that is not measured is 0.
    """
    count = len(leaders)
    rates = torch.zeros(count, count, dtype=torch.float64)
    out, into = (torch.zeros(LINK_BYTES // 4, device=world.device) for _ in range(2))
    far = [2**power for power in range((count - 1).bit_length())]
    steps = range(1, count) if count <= ALL_PAIRS else far
    end = time.perf_counter() + TURN_SECONDS
    for turn, step in itertools.product(range(MOST_TURNS), steps):
        # Also a barrier.
        if world.has_any(time.perf_counter() > end) and turn >= TURNS:
            break
        if world.rank not in leaders:
            continue
        own = leaders.index(world.rank)
        source, target = (own - step) % count, (own + step) % count
        begin = time.perf_counter()
        send = dist.P2POp(dist.isend, out, leaders[target])
        receive = dist.P2POp(dist.irecv, into, leaders[source])
        *others, last = dist.batch_isend_irecv([send, receive])  # NCCL gives one for both
        last.wait()  # once: a second wait for a received message of gloo hangs
        synchronize(world.device)
        rate = LINK_BYTES / (time.perf_counter() - begin)
        rates[source, own] = max(rate, float(rates[source, own]))
        for work in others:
            work.wait()
    dist.all_reduce(rates)
    return [[float(rate) for rate in row] for row in rates]


def agreed(measure: Callable[[], list[list[float]]], names: Sequence[str]) -> list[list[float]]:
    """Return the best rate of each pair; measure again while a host or link is slow."""
    rates = measure()
    for _ in range(MEASUREMENTS - 1):
        if slow_parts(rates, names):
            pairs = zip(rates, measure(), strict=True)
            rates = [[*map(max, row, again)] for row, again in pairs]
    return rates


def slow_parts(rates: Sequence[Sequence[float]], names: Sequence[str]) -> list[str]:
    """Name the hosts that are slow with most others, and then the links that are slow alone."""
    known = [rate for row in rates for rate in row if rate]
    if len(names) < 3:
        return []  # of two hosts nobody can say which is slow
    limit = SLOW * quantiles(known, n=4, method="inclusive")[-1]
    found, slow = [], set()
    for number, name in enumerate(names):
        received = [row[number] for row in rates]
        for verb, row in (("sends", rates[number]), ("receives", received)):
            middle = median([rate for rate in row if rate])
            if middle < limit:
                found.append(f"slow host: {name} {verb} {size(middle)}/s")
                slow.add(number)
    for source, row in enumerate(rates):
        for target, rate in enumerate(row):
            if 0 < rate < limit and not slow & {source, target}:
                found.append(f"slow link: {names[source]} to {names[target]}, {size(rate)}/s")
    return found


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table on rank 0; return the exit code."""
    parser = command_parser("network", __doc__)
    sizes = "bytes of the collectives (default: 64K,1M,16M)"
    parser.add_argument("--sizes", type=_sizes, default=_sizes("64K,1M,16M"), help=sizes)
    parser.add_argument("--device", default="auto", help="cpu or cuda (default: auto)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    try:
        world = World.join(options.device)
        if world.world_size == 1:
            raise RefusedError("one rank has nobody to talk to: rollcall network --nodes 2")
    except (ConfigError, RefusedError) as error:
        return refuse(error)
    found = measure(world, options.sizes)
    if world.is_main:
        print(json.dumps(found, indent=1) if options.json else "\n".join(_lines(found)), flush=True)
    world.leave()
    return 0


def measure(world: World, sizes: Sequence[int]) -> dict[str, Any]:
    """Return everything measured, the same on all ranks."""
    ranks = world.world_size
    load = round(100 * os.getloadavg()[0] / (os.cpu_count() or 1))  # percent of all CPUs
    of_rank = world.gather(torch.tensor([world.local_rank, load])).tolist()
    leaders = firsts([row[0] for row in of_rank])
    hosts_of_ranks = world.gather_text(world.host)
    names = [hosts_of_ranks[rank] for rank in leaders]
    busy = {name for rank, name in zip(leaders, names, strict=True) if of_rank[rank][1] > 100}
    if len(set(names)) < len(names):  # ranks of one machine
        names = [f"{name} rank {rank}" for name, rank in zip(names, leaders, strict=True)]
    rows = []
    for count in (max(1, given // 4 // ranks) * ranks for given in sizes):
        for kind, (share, work) in collectives(world, count).items():
            taken = seconds(world, work)
            bus = share * 4 * count / taken
            rows.append({"kind": kind, "bytes": 4 * count, "seconds": taken, "bus": bus})
    rates = agreed(partial(links, world, leaders), names)
    interface = _interface(world)
    link = psutil.net_if_stats().get(interface)
    return {
        "ranks": ranks,
        "hosts": names,
        "backend": "nccl" if world.device.type == "cuda" else "gloo",
        "interface": interface,
        "wire": link.speed * 1e6 / 8 if link else 0.0,  # bytes per second; 0 if it is unknown
        "collectives": rows,
        "links": rates,
        "slow": slow_parts(rates, names),
        "busy": sorted(busy),
    }


def _lines(found: dict[str, Any]) -> list[str]:
    can = f"the wire can do {size(found['wire'])}/s" if found["wire"] else "its speed is unknown"
    first = f"{found['ranks']} ranks, {found['backend']} over {found['interface']}: {can}"
    rows = [("collective", "size", "time", "bus bandwidth")]
    for row in found["collectives"]:
        taken = f"{1000 * row['seconds']:.2f} ms"
        rows.append((row["kind"], size(row["bytes"]), taken, f"{size(row['bus'])}/s"))
    rates = [["from \\ to", *found["hosts"]]]
    for name, row in zip(found["hosts"], found["links"], strict=True):
        rates.append([name, *(f"{size(rate)}/s" if rate else "" for rate in row)])
    shown = table(rates) if len(rates) < 10 else []
    slow = found["slow"] or ["no host and no link is slow"]
    busy = f"busy: {listed(found['busy'])}; rates may be too low: measure again on idle hosts"
    return [first, *table(rows), "", *shown, *slow, *([busy] if found["busy"] else [])]


def _interface(world: World) -> str:
    given = os.environ.get("NCCL_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME")
    peers = [name for name in world.place.nodes if name != world.host]
    return given.lstrip("=") if given else hosts.route(peers[0]).interface if peers else "lo"


def _sizes(text: str) -> list[int]:
    words = [re.fullmatch(r"(0*[1-9]\d*)([KMG]?)", word) for word in text.split(",")]
    if not all(words):
        raise argparse.ArgumentTypeError(f"expected sizes such as 64K,16M, not '{text}'")
    return sorted(int(it[1]) * 1024 ** ["", "K", "M", "G"].index(it[2]) for it in words if it)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
