"""Measure the time to a given loss over a slow link, for each way to exchange what replicas learn.

    PYTHONPATH=. python tests/campaigns/slow_link.py

Two replicas train on this machine, each in a network namespace with its own thread. Between them is
a link that carries 200 Mbit/s in each direction. It needs root, `ip` and `tc`.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rollcall.cli.installation import TRAIN
from rollcall.messages.text import duration
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.tools.bench import turns

ROOT = Path(__file__).parents[2]
WAYS = {
    "`ddp`": [],
    "`ddp`, `compression=bf16`": ["parallel.compression=bf16"],
    "`ddp`, `compression=powersgd`": ["parallel.compression=powersgd"],
    "`local-sgd`, `sync_every=20`": ["parallel.sync=local-sgd", "parallel.sync_every=20"],
    "`diloco`, `sync_every=20`": ["parallel.sync=diloco", "parallel.sync_every=20"],
    "the same, `sync_compression=int4`": [
        *("parallel.sync=diloco", "parallel.sync_every=20", "parallel.sync_compression=int4"),
    ],
    "`diloco`, `sync_fragments=4`, `sync_overlap=4`": [
        *("parallel.sync=diloco", "parallel.sync_every=20"),
        *("parallel.sync_fragments=4", "parallel.sync_overlap=4"),
    ],
}
MODEL = [
    *("gpt", "device=cpu", "model.num_layers=2", "model.hidden_size=256", "data.seq_len=64"),
    *("data.global_batch=16", "optim.lr=1e-3", "optim.warmup_steps=20", "optim.schedule=constant"),
    *(f"data.path={argparse.__file__}", "checkpoint.every=null", "log.every=1"),
]


class Curve(NamedTuple):
    """What a run did: the seconds of a step, and validation losses by seconds of training."""

    step: float
    losses: dict[float, float]

    def until(self, loss: float) -> float:
        """Return the seconds until a loss that it has reached."""
        return next(at for at, found in self.losses.items() if found <= loss)


def main(argv: Sequence[str]) -> int:
    """Measure and print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=float, default=200, help="of the link, per second")
    parser.add_argument("--steps", type=int, default=200, help="of each run")
    parser.add_argument("--every", type=int, default=10, help="steps between two validations")
    options = parser.parse_args(argv)
    with two_sites(options.mbit) as sites:
        curves = {name: run(sites, options, words) for name, words in WAYS.items()}
    goal = max(min(curve.losses.values()) for curve in curves.values())
    first = next(iter(curves.values())).until(goal)
    rows = [("", "step", "last loss", f"seconds to {goal:.2f}", "times as fast")]
    for name, curve in curves.items():
        reached, last = curve.until(goal), [*curve.losses.values()][-1]
        figures = f"{last:.2f}", f"{reached:.0f}", f"{first / reached:.1f}"
        rows.append((name, duration(curve.step), *figures))
    turns.show(f"gpt, 2 replicas, {options.mbit:g} Mbit/s", rows)
    return 0


@contextmanager
def two_sites(mbit: float) -> Iterator[list[str]]:
    """Make two network namespaces with a link between them; yield their names."""
    names = [f"rollcall-{os.getpid()}-{number}" for number in range(2)]
    try:
        for name in names:
            _do("ip", "netns", "add", name)
        peer = ["peer", "name", "eth0", "netns", names[1]]
        _do("ip", "link", "add", "eth0", "netns", names[0], "type", "veth", *peer)
        limit = ["rate", f"{mbit:g}mbit", "burst", "256kb", "latency", "1s"]
        for number, name in enumerate(names, start=1):
            _do("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _do("ip", "-n", name, "link", "set", device, "up")
            _do("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def _do(*command: str) -> None:
    subprocess.run(command, check=True)


def run(sites: Sequence[str], options: argparse.Namespace, words: Sequence[str]) -> Curve:
    """Train one replica in each site."""
    with tempfile.TemporaryDirectory(prefix="rollcall-slow-link-") as folder:
        run_dir = RunDir(folder, "run")
        keys = [f"train.steps={options.steps}", f"train.evaluate_every={options.every}"]
        ranks: list[subprocess.Popen[bytes]] = []
        for rank, site in enumerate(sites):
            place: dict[str, object] = {
                "RANK": rank,
                "WORLD_SIZE": 2,
                "LOCAL_RANK": 0,
                "LOCAL_WORLD_SIZE": 1,
            }
            place |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": 29500, "OMP_NUM_THREADS": 1}
            env = {**os.environ, **{name: str(value) for name, value in place.items()}}
            command = ["ip", "netns", "exec", site, sys.executable, *TRAIN, *MODEL, *keys, *words]
            ranks.append(
                subprocess.Popen(
                    [*command, *run_dir.words],
                    cwd=ROOT,
                    env=env | {"GLOO_SOCKET_IFNAME": "eth0"},
                    stdout=subprocess.DEVNULL,
                )
            )
        try:
            codes = [process.wait() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(codes):
            raise turns.BenchError(f"the ranks ended with {codes}; {' '.join(words)}")
        steps = [line for line in read_lines(run_dir.metrics) if "loss" in line]
        evaluated = run_dir.read_events("evaluated")
    times = [line["time"] for line in steps]
    seconds = [after - before for before, after in pairwise(times)]
    losses = {line["time"] - times[0]: line["loss"] for line in evaluated}
    return Curve(statistics.median(seconds), losses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
