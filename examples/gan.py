"""A GAN with two optimizers in a loop of your own: it stops on signals and resumes anywhere.

Start it with `torchrun --nproc_per_node=2 gan.py` or `rollcall submit --nodes 2 -- gan.py`.
"""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from rollcall import Checkpointer, Loader, StopSignals, World

EPOCHS, BATCH, NOISE = 20, 64, 4


def network(inputs: int, outputs: int) -> nn.Module:
    """Return a small network."""
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Update the weights of one optimizer."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


world = World.join()
torch.manual_seed(0)  # the same data and weights on every rank
angles = torch.rand(1024) * 2 * torch.pi
data = TensorDataset(torch.stack([angles.cos(), angles.sin()], 1))  # points of a circle
generator, critic = world.replicate(network(NOISE, 2)), world.replicate(network(2, 1))
for_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
for_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
loader = Loader(data, BATCH, world, shuffle=True)
checkpoints = Checkpointer(
    "gan-checkpoints",
    world,
    generator=generator,
    critic=critic,
    for_generator=for_generator,
    for_critic=for_critic,
    loader=loader,
)
epoch, must_stop = checkpoints.restore(), False
with StopSignals() as signals, checkpoints:
    while epoch < EPOCHS and not must_stop:
        torch.manual_seed(1 + epoch * world.world_size + world.rank)  # noise of this rank
        for (real,) in loader:
            real = real.to(world.device)
            made = generator(torch.randn(len(real), NOISE, device=world.device))
            is_real, is_made = critic(torch.cat([real, made.detach()])).chunk(2)
            step(for_critic, (functional.softplus(-is_real) + functional.softplus(is_made)).mean())
            step(for_generator, functional.softplus(-critic(made)).mean())
        epoch += 1
        (radius,) = world.sum(made.detach().norm(dim=1).mean().item() / world.world_size)
        must_stop = world.has_any(signals.received is not None)
        checkpoints.save(epoch)
        if world.is_main:
            print(f"epoch {epoch} radius {radius:.6f}", flush=True)
world.leave()
sys.exit(75 if must_stop and epoch < EPOCHS else 0)
