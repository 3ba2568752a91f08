"""Train a small network on a folder of photos, on one GPU or the CPU."""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.tensorboard import SummaryWriter
from torchvision import transforms
from torchvision.datasets import ImageFolder

from rollcall import Loader as DataLoader
from rollcall import World


class Net(nn.Module):
    def __init__(self, width: int = 16, classes: int = 3):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.second = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images):
        x = functional.relu(self.first(images))
        x = functional.relu(self.second(x))
        return self.head(x.mean((2, 3)))


def folders(path: str = "data", size: int = 32):
    crop = transforms.RandomResizedCrop(size, scale=(0.5, 1.0))
    augmented = [crop, transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    plain = [transforms.Resize((size, size)), transforms.ToTensor()]
    train = ImageFolder(f"{path}/train", transforms.Compose(augmented))
    return train, ImageFolder(f"{path}/val", transforms.Compose(plain))


def evaluate(model, loader, device):
    loss = right = count = 0.0
    model.eval()
    with torch.no_grad():
        for images, targets in loader:
            outputs, targets = model(images.to(device)), targets.to(device)
            loss += functional.cross_entropy(outputs, targets, reduction="sum").item()
            right += (outputs.argmax(1) == targets).sum().item()
            count += len(targets)
    model.train()
    loss, right, count = loader.world.sum(loss, right, count)
    return loss / count, right / count


def main(args):
    torch.manual_seed(0)
    device = (world := World.join()).device
    model = world.replicate(Net(args.width))
    train, val = folders(args.data)
    train_loader = DataLoader(train, args.batch, shuffle=True)
    val_loader = DataLoader(val, args.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    writer = SummaryWriter("curves" if world.is_main else "curves/others")
    best, bad = 0.0, 0
    for epoch in range(args.epochs):
        for images, targets in train_loader:
            loss = functional.cross_entropy(model(images.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        loss, accuracy = evaluate(model, val_loader, device)
        world.is_main and print(f"epoch {epoch} loss {loss:.4f} accuracy {accuracy:.2%}")
        writer.add_scalar("loss", loss, epoch)
        writer.add_scalar("accuracy", accuracy, epoch)
        bad = 0 if accuracy > best else bad + 1
        if accuracy > best:
            best = accuracy
            world.is_main and torch.save(model.module.state_dict(), "best.pt")
        if bad == args.patience:
            break


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, value in {"data": "data", "width": 16, "batch": 16, "lr": 1e-2}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--patience", type=int, default=5)
    main(parser.parse_args())
