"""Kill random ranks at random times, in many short runs, and check that nothing is lost.

`PYTHONPATH=.:tests/helpers python tests/campaigns/random_kills.py 200` stops after 200 killed
attempts. Two ranks change a state, partly sharded, and save it all the time. After every kill, all
published checkpoints must be complete; every run must end with the right numbers and without
leftover files. With `--trainings`, whole trainings are killed, including their supervisors
(random_kills_of_trainings.py); `--lab` starts a Slurm cluster for them, so that batch processes are
killed, too.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import random_kills_of_trainings
import torch
import torch.distributed as dist
from checkpoints import restored, save
from lab import running_lab
from ranks import FORKSERVER, TIMEOUT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rollcall.system.hosts import free_port
from rollcall.train.checkpoint import layout
from rollcall.train.checkpoint.engine import Engine
from rollcall.train.checkpoint.store import CheckpointStore
from rollcall.train.checkpoint.tools import export, verify
from rollcall.train.ranks.world import World

RANKS = 2
STEPS = 40
KEEP = 3
STEP_SECONDS = 0.005
NUMBERS = 200_000


def campaign(kills: int, root: Path, seed: int) -> str:
    """Kill this number of attempts, in one run after another; return a summary.

    Raises:
        AssertionError: a checkpoint is damaged, or a run ended with wrong numbers or extra files.
    """
    chance = random.Random(seed)
    longest = float(TIMEOUT)
    for number in range(2):  # the first one also imports torch
        began = time.monotonic()
        assert _end(_start(root / f"undisturbed-{number}"), TIMEOUT) == [0] * RANKS
        longest = min(longest, time.monotonic() - began)
    counts: Counter[str] = Counter()
    while counts["killed"] < kills:
        counts["runs"] += 1
        place = root / f"run-{counts['runs']}"
        within = longest
        while not _attempt(place, chance, counts, within):
            within *= 1.1  # so that the run also ends if the machine has become slower
        names = {path.name for path in place.iterdir()}
        expected = layout.path_of(place, STEPS).name
        assert expected in names and len(names) <= KEEP, names
        assert all(name.startswith("step-") for name in names), names
        model = export.read(layout.path_of(place, STEPS))["model"]
        right = _advance(torch.arange(NUMBERS), range(STEPS))
        assert torch.equal(model["whole"], right) and torch.equal(model["sharded"], right)
        shutil.rmtree(place)
    return ", ".join(f"{number} {name}" for name, number in counts.items())


def _attempt(place: Path, chance: random.Random, counts: Counter[str], longest: float) -> bool:
    """Start the ranks and kill some; return whether the run finished before."""
    ranks = _start(place)
    victim = chance.randrange(RANKS + 1)  # one rank, or all of them, like a lost host
    deadline = time.monotonic() + chance.random() * longest
    while time.monotonic() < deadline and any(rank.is_alive() for rank in ranks):
        time.sleep(0.01)
    for rank in ranks if victim == RANKS else [ranks[victim]]:
        rank.kill()
    # The other ranks notice the loss and exit, or are killed shortly after.
    codes = _end(ranks, chance.random() * 0.3)
    if place.exists():
        counts["while saving"] += any(path.name.startswith(".saving") for path in place.iterdir())
        for checkpoint in layout.published(place).values():
            counts["checkpoints verified"] += 1
            found = verify.problems(checkpoint)
            assert not found, (checkpoint, found)
    if codes == [0] * RANKS:
        return True
    counts["killed"] += 1
    counts["of all ranks"] += victim == RANKS
    return False


def _start(place: Path) -> list[BaseProcess]:
    port = free_port()
    ranks = [FORKSERVER.Process(target=_work, args=(rank, port, place)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    return list(ranks)


def _end(ranks: list[BaseProcess], seconds: float) -> list[int | None]:
    deadline = time.monotonic() + seconds
    for rank in ranks:
        rank.join(max(0, deadline - time.monotonic()))
    for rank in ranks:
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


def _work(rank: int, port: int, place: Path) -> None:
    with (place.parent / f"rank-{rank}.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    world = World.join("cpu")
    mesh = init_device_mesh("cpu", (RANKS,))

    def start() -> dict[str, Any]:
        whole = torch.arange(NUMBERS)
        return {"model": {"whole": whole, "sharded": distribute_tensor(whole, mesh, [Shard(0)])}}

    checkpoints = Engine(CheckpointStore(place, world, keep=KEEP))
    checkpoints.clean()
    first, state = restored(checkpoints, start()) or (0, start())
    checkpoints.store.retire()
    sharded = state["model"]["sharded"].to_local()
    for step in range(first, STEPS):
        _advance(state["model"]["whole"], range(step, step + 1))
        _advance(sharded, range(step, step + 1))
        time.sleep(STEP_SECONDS)
        sums = torch.tensor(checkpoints.signals(), dtype=torch.float32)
        dist.all_reduce(sums)
        outcome = checkpoints.settle(sums.tolist())
        assert not outcome or not outcome.problem, outcome
        if not checkpoints.busy:
            checkpoints.begin(step + 1, state)
    checkpoints.drain()
    if checkpoints.store.newest() != STEPS:
        save(checkpoints, STEPS, state)
    world.leave()


def _advance(numbers: torch.Tensor, steps: range) -> torch.Tensor:
    for step in steps:
        numbers.mul_(3).add_(step)  # 64-bit integers wrap in the same way everywhere
    return numbers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int, nargs="?", default=200)
    parser.add_argument("--trainings", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lab", action="store_true")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="kills-"))  # kept if something was lost
    if options.lab:
        with running_lab(directory.name, "--nodes", "2") as lab:
            of_trainings = random_kills_of_trainings.campaign
            print(of_trainings(options.kills, directory, options.seed, lab))
    else:
        run = random_kills_of_trainings.campaign if options.trainings else campaign
        print(run(options.kills, directory, options.seed))
    shutil.rmtree(directory)
