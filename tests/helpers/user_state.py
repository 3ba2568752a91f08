"""Models, losses and optimizers that keep state, and the same training by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import TensorDataset

WIDTH, CLASSES, BATCH, RATE = 6, 5, 12, 0.01
WORDS = [
    *("device=cpu", "data.name=user_state:vectors", f"data.global_batch={BATCH}", "log.every=1"),
    *("optim.name=sgd", "optim.momentum=0.9", f"optim.lr={RATE}", "optim.weight_decay=0"),
    *("optim.schedule=constant", "optim.warmup_steps=0", "optim.clip_norm=null"),
    *("train.evaluate_every=null", "checkpoint.keep_last=9"),
]


def vectors() -> Any:
    drawn = torch.Generator().manual_seed(5)
    inputs = torch.randn(84, WIDTH, generator=drawn)
    targets = torch.randint(0, CLASSES, (84,), generator=drawn)
    return TensorDataset(inputs[:60], targets[:60]), TensorDataset(inputs[60:], targets[60:])


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


class Rare(Net):
    """Has a layer for rare rows, which not every rank uses in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, is_rare = super().forward(x), x[:, :1] > 1.2
        return out + torch.where(is_rare, self.rare(x), 0) if is_rare.any() else out


class Annealed(Net):
    """Scales its output by how often it was called in training."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(x) * (1 + 0.1 * self.calls)


class Centers(nn.Module):
    """A loss with a center for each class, a temperature, and a running mean, as ArcFace's."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.linspace(-1, 1, CLASSES**2).view(CLASSES, CLASSES).cos())
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("largest", torch.zeros(()))
        self.largest: torch.Tensor

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = outputs @ self.centers.t() * self.temperature.exp()
        return functional.cross_entropy(scores, targets, reduction="none")


class OfClasses(nn.CrossEntropyLoss):
    """Weights of classes, which are not trained."""

    def __init__(self) -> None:
        super().__init__(torch.arange(1.0, CLASSES + 1), reduction="none")


class OfModel(Centers):
    """The same, which calls the model itself."""

    def forward(self, model: nn.Module, batch: Any) -> Any:  # type: ignore[override]
        inputs, targets = batch
        losses = super().forward(model(inputs), targets)
        return losses.sum(), len(losses)


class Running:
    """Divides by a running mean of its losses, which it saves if `is_saved`."""

    def __init__(self, is_saved: bool = True) -> None:
        self.mean: float | None = None
        if is_saved:
            self.state_dict = self._state
            self.load_state_dict = self._load

    def _state(self) -> dict[str, Any]:
        return {"mean": self.mean, "seen": [torch.ones(2), {"at": 1}]}

    def _load(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["seen"][0], torch.ones(2)) and state["seen"][1] == {"at": 1}
        self.mean = state["mean"]

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = functional.cross_entropy(outputs, targets, reduction="none")
        if not losses.requires_grad:
            return losses
        now = float(losses.detach().mean())
        self.mean = now if self.mean is None else 0.5 * self.mean + 0.5 * now
        return losses / self.mean


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


class Counting:
    """A callback that counts the steps, also over attempts."""

    def __init__(self) -> None:
        self.state = {"steps": torch.zeros(1, dtype=torch.int64)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state

    def settle(self, _step: object, _agreed: object) -> None:
        self.state["steps"] = self.state["steps"] + 1

    def close(self) -> None:
        print(f"{int(self.state['steps'])} steps")


class Exits:
    """A callback that ends its process with 0."""

    def settle(self, _step: object, _agreed: object) -> None:
        raise SystemExit(0)


class Evaluations:
    """A metric that counts the evaluations."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def __call__(self, outputs: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(outputs))

    def result(self, _total: torch.Tensor) -> float:
        self.count += 1
        return self.count


def by_hand(
    model: nn.Module,
    loss: Callable[..., torch.Tensor],
    steps: int,
    make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> list[float]:
    """Train in plain PyTorch; return the losses."""
    from rollcall.train.data.order import Order

    inputs, targets = vectors()[0].tensors
    trained = [*model.parameters(), *(loss.parameters() if isinstance(loss, nn.Module) else ())]
    optimizer = make(trained) if make else torch.optim.SGD(trained, lr=RATE, momentum=0.9)
    order, losses = Order(60, steps * BATCH, BATCH, seed=0), []
    for step in range(steps):
        rows = torch.tensor(order.samples(step, range(BATCH))[0])
        mean = loss(model(inputs[rows]), targets[rows]).mean()
        optimizer.zero_grad()
        mean.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(mean.item())
    return losses


class Own(torch.optim.Optimizer):
    """Optimizers with a mistake: a counter, a norm of shards, a decay of another name; noise.

    The kinds "whole" and "shards" fail on rank 1 alone, with such weights; of shards, others wait.
    """

    def __init__(self, params: Any, lr: float = 0.01, kind: str = "none") -> None:
        super().__init__(params, {"lr": lr, "wd": 0.1})
        self.kind, self.count = kind, 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        self.count += 1
        is_sharded = isinstance(self.param_groups[0]["params"][0], DTensor)
        if torch.distributed.get_rank() == 1 and self.kind == ("shards" if is_sharded else "whole"):
            raise RuntimeError("rank 1 cannot")
        if is_sharded and self.kind == "shards":
            self.param_groups[0]["params"][0].full_tensor()  # of all ranks
        for group in self.param_groups:
            for weight in [one for one in group["params"] if one.grad is not None]:
                state, change = self.state[weight], weight.grad
                if self.kind == "centered" and weight.ndim == 2:
                    change = change - change.mean(1, keepdim=True)
                if self.kind == "decay":
                    change = change + group["wd"] * weight
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(weight)
                state["step"] += 1
                state["mean"].lerp_(change, 0.5)
                rate = group["lr"]
                if self.kind == "norm":
                    rate *= float(weight.norm()) / (float(change.norm()) + 1)
                if self.kind == "limit":  # the norm of small weights alone
                    rate *= min(1.0, float(weight.norm()))
                if self.kind == "counter":
                    rate /= self.count
                if self.kind == "noise":
                    weight.add_(torch.randn_like(weight), alpha=rate)
                weight.sub_(state["mean"], alpha=rate)


class Row(Net):
    """A weight of one row, as class tokens are."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.ones(1, 6))


class Odd(Net):
    """Weights that FSDP2 cannot shard: a scalar, complex, transposed, of another type, tied."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turns = nn.Parameter(torch.complex(torch.linspace(0, 1, 6), torch.ones(6)))
        self.mixed = nn.Parameter(torch.linspace(-1, 1, 30).view(6, 5).t())
        self.small = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.inner.append(nn.Identity())
        self.inner[2].register_parameter("gain", nn.Parameter(torch.tensor(0.5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_real(x * self.turns).sum(-1)
        out = super().forward(turned) * self.scale + turned @ self.mixed.t()
        return out * self.small.float() + self.inner.get_parameter("2.gain")


def penalized(model: nn.Module, batch: Any) -> Any:
    inputs, targets = batch
    losses = cross_entropy(model(inputs), targets)
    penalty = sum(w.square().sum() for w in model.parameters())
    return losses.sum() + len(losses) * penalty, len(losses)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of seven tokens, with a mask that hides nothing."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(7) + index % 4
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def tokens() -> Any:
    return Tokens(), None


class Masked(nn.Module):
    """Reads a value of the mask, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        x: torch.Tensor = self.table(input_ids)
        if attention_mask is not None and not attention_mask.all():
            x = x * attention_mask.unsqueeze(-1)
        out: torch.Tensor = self.head(x)
        return out


def of_tokens(model: nn.Module, batch: Any) -> Any:
    losses = functional.cross_entropy(
        model(batch["input_ids"]).transpose(1, 2), batch["labels"], reduction="none"
    )
    return losses.sum(), losses.numel()


class Squared(nn.Module):
    """Multiplies its weights with each other in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.eye(WIDTH))
        self.weight = nn.Parameter(torch.ones(WIDTH, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.square @ self.weight)
