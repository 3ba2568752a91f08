"""A bare script that trains the default recipe's model, for `python -m rollcall.bench startup`.

It takes `run.root=…` and `run.name=…`, and writes the time of its first step where a run would.
"""

import os
import sys

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from rollcall.run_dir import RunDir


def main(words: list[str]) -> None:
    """Train one step on every rank."""
    given = dict(word.split("=", 1) for word in words if "=" in word)
    torch.distributed.init_process_group("gloo")
    digits = load_digits()
    inputs = torch.from_numpy(digits.images).float()[:, None] / 16
    targets = torch.from_numpy(digits.target)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Conv2d(1, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 64, 10),
    )
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    cross_entropy(model(inputs[:16]), targets[:16]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    if os.environ["RANK"] == "0":
        run = RunDir(given["run.root"], given["run.name"])
        run.path.mkdir(parents=True)
        run.record("first_step", step=1)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
