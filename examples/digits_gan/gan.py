"""A GAN that draws digits: a critic and a generator, trained in turn, each by its own optimizer."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import Subset, TensorDataset

NOISE = 16


class Digits(TensorDataset):
    """Images with noise. Noise that belongs to a sample is the same on any number of ranks."""

    def __init__(self):
        super().__init__(torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16)

    def __getitem__(self, index):
        return *super().__getitem__(index), torch.randn(NOISE)  # it is seeded for each sample


def load():
    """Return training and validation data."""
    digits = Digits()
    return Subset(digits, range(1500)), Subset(digits, range(1500, len(digits)))


class Networks(nn.Module):
    """Both networks; the loss calls them."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 8 * width),
            nn.Unflatten(1, (2 * width, 2, 2)),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, 2, 1),
            nn.Sigmoid(),
        )
        self.critic = nn.Sequential(
            spectral_norm(nn.Conv2d(1, width, 4, 2, 1)),
            nn.LeakyReLU(0.2),
            spectral_norm(nn.Conv2d(width, 2 * width, 4, 2, 1)),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            spectral_norm(nn.Linear(8 * width, 1)),
        )


class Gan:
    """The hinge loss of BigGAN, https://arxiv.org/abs/1809.11096: two steps of the critic for one."""

    turns = ("critic", "critic", "generator")

    def __call__(self, model, batch, turn):
        """Return the sum of the losses of the network whose turn it is, and their number."""
        real, noise = batch
        if turn == "generator":
            losses = -model.critic(model.generator(noise))
        else:
            with torch.no_grad():
                drawn = model.generator(noise)
            losses = functional.relu(1 - model.critic(real)) + functional.relu(
                1 + model.critic(drawn)
            )
        return losses.sum(), len(real)

    def samples(self, model):
        """Return images for the report, from 0 to 1."""
        device = next(model.parameters()).device
        return model.generator(torch.randn(36, NOISE, device=device))
