"""Scripts as people publish them print the same numbers under torchrun and under submit.

tests/campaigns/public_scripts.py does the same with scripts of public repositories.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from public_scripts import Row, compare

MODEL = """
import os, torch, torch.distributed as dist
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
rows = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
def train(net, loader, optimizer, name="loss"):
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} {name} {loss.item():.9f}", flush=True)
"""
SCRIPTS = {
    "ddp.py": """
from model import *
from torch.utils.data.distributed import DistributedSampler
dist.init_process_group("gloo")
net = nn.parallel.DistributedDataParallel(net)
loader = torch.utils.data.DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows))
train(net, loader, torch.optim.Adam(net.parameters()))
dist.destroy_process_group()
""",
    "launch.py": """
import argparse
from model import *
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=int(os.environ["LOCAL_RANK"]))
parser.add_argument("--lr", type=float)
options = parser.parse_args()
dist.init_process_group("gloo", init_method="env://")
assert options.local_rank == dist.get_rank()
share = torch.utils.data.Subset(rows, range(options.local_rank, 32, dist.get_world_size()))
train(net, torch.utils.data.DataLoader(share, 4), torch.optim.SGD(net.parameters(), options.lr))
""",
    "spawn.py": """
from model import *
import random, torch.multiprocessing
def work(rank, port):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    ddp = nn.parallel.DistributedDataParallel(net)
    loader = torch.utils.data.DataLoader(torch.utils.data.Subset(rows, range(rank, 32, 2)), 4)
    train(ddp, loader, torch.optim.SGD(net.parameters(), 0.1), "loss" if rank == 0 else "other")
    dist.destroy_process_group()
if __name__ == "__main__":
    port = random.randrange(16_384, 20_000)  # below those that the kernel gives to others
    torch.multiprocessing.spawn(work, (port,), nprocs=2)
""",
    "sharded.py": """
from model import *
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters(), 0.01)
train(net, torch.utils.data.DataLoader(rows, 8), optimizer)
dcp.save({"net": net.state_dict()}, checkpoint_id="out/saved")
state = {"net": net.state_dict()}
dcp.load(state, checkpoint_id="out/saved")
print(f"loss {sum(it.full_tensor().sum().item() for it in state['net'].values()):.9f}")
dist.destroy_process_group()
""",
    "fails.py": """
from model import *
dist.init_process_group("gloo")
total = torch.ones(1) * dist.get_rank()
for step in range(3):
    dist.all_reduce(total)
    print(f"loss {total.item() / 7:.9f}", flush=True)
    dist.barrier()
raise ValueError("diverged")
""",
}
ROWS = [
    Row("own/ddp.py", ranks=2),
    Row("own/launch.py", "--lr 0.1", ranks=2),
    Row("own/spawn.py"),
    Row("own/sharded.py", ranks=2),
    Row("own/fails.py", ranks=2, code=1),
]


@pytest.mark.long
@pytest.mark.parametrize(
    "row",
    [ROWS[0], *(pytest.param(row, marks=pytest.mark.long) for row in ROWS[1:])],
    ids=[row.name for row in ROWS],
)
def test_a_script_prints_the_same_numbers(tmp_path: Path, row: Row) -> None:
    (tmp_path / "own").mkdir()
    for name, text in {**SCRIPTS, "model.py": MODEL}.items():
        (tmp_path / "own" / name).write_text(text)
    assert "values equal, the last" in compare(row, tmp_path)


@pytest.mark.long
def test_another_number_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "clock.py").write_text("import time; print('loss', time.time())")
    assert compare(Row("own/clock.py"), tmp_path).startswith("DIFFERS: [['1")
