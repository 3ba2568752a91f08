"""The least that a start and a restart take: a bare script, under torchrun or forked ranks.

`torchrun bare.py FOLDER STEPS` is the script that many people begin with. With a third word, the
number of ranks, this process imports torch once and forks them, and again whenever one has died.
The data are random, so nothing is read but the checkpoint.
"""

import gc
import importlib
import os
import signal
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from rollcall.records.run_dir import RunDir
from rollcall.train import torch_private

BATCH = 64
"""Samples of a step, over all ranks."""


def train(run: RunDir, steps: int) -> None:
    """Train the default recipe's CNN; rank 0 saves after the first step and records it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
    head = nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)
    model = DistributedDataParallel(nn.Sequential(*layers, *head))
    optimizer, rows = torch.optim.AdamW(model.parameters()), BATCH // dist.get_world_size()
    if (saved := run.path / "saved.pt").exists():
        model_state, optimizer_state = torch.load(saved, weights_only=True)
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
    for step in range(steps):
        outputs = model(torch.rand(rows, 1, 8, 8))
        cross_entropy(outputs, torch.randint(10, (rows,))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and dist.get_rank() == 0:
            run.record("first_step")
            torch.save((model.state_dict(), optimizer.state_dict()), saved)
    dist.destroy_process_group()


def fork_ranks(run: RunDir, steps: int, ranks: int) -> None:
    """Fork ranks that train, until they end in order."""
    importlib.import_module(torch_private.COMPILER)
    gc.freeze()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks)}
    code = 1
    while code:
        with socket.create_server(("127.0.0.1", 0)) as free:
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        pids = []
        for rank in range(ranks):
            pids.append(os.fork())
            if not pids[-1]:
                os.environ["RANK"] = str(rank)
                os.dup2(os.open(run.path / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT), 1)
                train(run, steps)
                os._exit(0)
        first, code = os.wait()
        for pid in {*pids} - {first}:
            if code:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    run, (steps, *ranks) = RunDir(place.parent, place.name), map(int, sys.argv[2:])
    if ranks:
        fork_ranks(run, steps, *ranks)
    else:
        train(run, steps)
    sys.stdout.flush()
    os._exit(0)
