"""The same training as loops of several kinds, each timed by its model: `bench step` starts them.

Every loop trains on scikit-learn's digits with the same model, global batch, loss and AdamW. The
model notes wall and CPU time when it has been called often enough, so nothing else is measured
than steps, and everything that a loop does between two of them.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from rollcall.config.schema import Data, Model
from rollcall.train.data.sets.digits import digits
from rollcall.train.data.source import BatchDataset, Source
from rollcall.train.dist.world import World
from rollcall.train.models.cnn import cnn
from rollcall.train.models.mlp import mlp

BATCH = 64
"""Samples of a step, over all ranks."""
RATE = 1e-3
WARM_UP = 100
"""Steps before the clock starts."""
MODELS: dict[str, Callable[[Model, Source], nn.Module]] = {"mlp": mlp, "cnn": cnn}
PIECES = (
    "rollcall.train.update:set_seed",
    "rollcall.train.data.order:Order.plan",
    "rollcall.train.data.reader:Reader.read",
    "rollcall.train.parallel.strategy:Strategy.forward_backward",
    "rollcall.train.parallel.strategy:Strategy.clip",
    "rollcall.train.update:Update._optimize",
    "rollcall.train.dist.agreement:Agreement.send",
    "rollcall.train.dist.agreement:Agreement.settle",
    "rollcall.train.health.replicas:Replicas.report",
    "rollcall.train.health.replicas:Replicas.settle",
    "rollcall.train.health.stragglers:Stragglers.report",
    "rollcall.train.health.stragglers:Stragglers.settle",
    "rollcall.train.metrics:Metrics.settle",
    "rollcall.train.trainer:Trainer._evaluate_or_save_if_due",
)
"""Functions of one step, whose times `--pieces` shows; some contain others."""


class Clock:
    """Times the steps of a model; the last call writes the result and ends the process."""

    def __init__(self, model: nn.Module) -> None:
        """Count the forward passes of the training."""
        self._calls = 0
        self._steps = int(os.environ["BENCH_STEPS"])
        self._start = (0.0, 0.0)
        self._pieces = _Pieces() if "BENCH_PIECES" in os.environ else None
        model.register_forward_pre_hook(self._tick)

    def _tick(self, module: nn.Module, _: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        self._calls += 1
        if self._calls == WARM_UP:
            self._start = time.perf_counter(), time.process_time()
            if self._pieces:
                self._pieces.seconds.clear()
        elif self._calls == WARM_UP + self._steps:
            wall, cpu = time.perf_counter() - self._start[0], time.process_time() - self._start[1]
            result = {"wall": wall / self._steps, "cpu": cpu / self._steps}
            if self._pieces:
                result |= {name: each / self._steps for name, each in self._pieces.seconds.items()}
            rank = os.environ.get("RANK", "0")
            Path(f"{os.environ['BENCH_RESULT']}.{rank}").write_text(json.dumps(result))


class _Pieces:
    """Measures the thread's CPU time inside the functions of PIECES."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        for place in PIECES:
            module, _, path = place.partition(":")
            owner: Any = sys.modules[module]
            *parents, name = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent)
            setattr(owner, name, self._timed(getattr(owner, name), path))

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time() - start
                self.seconds[name] = self.seconds.get(name, 0.0) + spent

        return timed


def timed_model(config: Model, source: Source) -> nn.Module:
    """Return the model that BENCH_MODEL names, with a clock: a `model.name` for rollcall."""
    model = MODELS[os.environ["BENCH_MODEL"]](config, source)
    Clock(model)
    return model


def rollcall() -> None:
    """Train with rollcall, everything on that is on by default."""
    from rollcall.train.main import main

    steps = WARM_UP + int(os.environ["BENCH_STEPS"]) + 1
    settings = {
        "data.name": "digits",
        "data.global_batch": BATCH,
        "model.name": "rollcall.bench.loops:timed_model",
        "model.hidden_size": 64,
        "optim.name": "adamw",
        "optim.lr": RATE,
        "train.steps": steps,
        "run.root": str(Path(os.environ["BENCH_RESULT"]).parent),
        "device": "cpu",
        "checkpoint.every": "null",
    }
    code = main([f"{key}={value}" for key, value in settings.items()])
    if code:
        raise SystemExit(code)


def bare() -> None:
    """Train with a loop of ten lines; several ranks use DistributedDataParallel."""
    model, inputs, targets, rows = _parts()
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    for step in range(WARM_UP + int(os.environ["BENCH_STEPS"])):
        chosen = rows[step % len(rows)]
        loss = cross_entropy(model(inputs[chosen]), targets[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def bare_with_all_reduce() -> None:
    """Train with the bare loop and one empty all-reduce per step: the floor of any control."""
    reduce = torch.zeros(16)
    if not dist.is_initialized():
        World.join("cpu")

    def send(*_: Any) -> None:
        work = dist.all_reduce(reduce, async_op=True)
        work.wait()

    nn.modules.module.register_module_forward_pre_hook(
        lambda module, _: send() if isinstance(module, nn.Flatten) else None
    )
    bare()


def accelerate() -> None:
    """Train with Hugging Face's accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = _loaded()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    _epochs(loader, model, optimizer, accelerator.backward)


def fabric() -> None:
    """Train with Lightning Fabric."""
    from lightning.fabric import Fabric

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    fabric.launch()
    model, optimizer, loader = _loaded()
    model, optimizer = fabric.setup(model, optimizer)
    _epochs(fabric.setup_dataloaders(loader), model, optimizer, fabric.backward)


def lightning() -> None:
    """Train with Lightning's Trainer, without checkpoints."""
    import lightning

    model, optimizer, loader = _loaded()

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=WARM_UP + int(os.environ["BENCH_STEPS"]),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Module(), loader)


LOOPS: dict[str, tuple[Callable[[], None], str]] = {
    "bare": (bare, "torch"),
    "bare + all-reduce": (bare_with_all_reduce, "torch"),
    "rollcall": (rollcall, "torch"),
    "Fabric": (fabric, "lightning"),
    "accelerate": (accelerate, "accelerate"),
    "Lightning": (lightning, "lightning"),
}
"""Each loop, and the package that it needs."""


def _digits() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a timed model, and all training digits."""
    torch.manual_seed(0)
    source = digits(Data(), cast(World, None))  # no rank is asked for these files
    batch = cast(BatchDataset, source.train).__getitems__(list(range(source.train_size)))
    return timed_model(Model(hidden_size=64), source), batch.inputs, batch.targets


def _parts() -> tuple[nn.Module, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return a timed model, the digits, and this rank's rows of each step of an epoch."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1 and not dist.is_initialized():
        World.join("cpu")
    model, inputs, targets = _digits()
    share = BATCH // ranks
    order = torch.randperm(len(inputs))
    steps = [order[start : start + BATCH] for start in range(0, len(inputs) - BATCH, BATCH)]
    return model, inputs, targets, [step[rank * share : (rank + 1) * share] for step in steps]


def _loaded() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """Return a timed model, its optimizer, and a DataLoader of this rank's share of a batch."""
    model, inputs, targets = _digits()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    share = BATCH // int(os.environ.get("WORLD_SIZE", "1"))
    data = TensorDataset(inputs, targets)
    return model, optimizer, DataLoader(data, share, shuffle=True, drop_last=True)


def _epochs(loader: Any, model: nn.Module, optimizer: Any, backward: Callable[..., Any]) -> None:
    """Train over the loader again and again until the clock has its result."""
    steps = 0
    while steps < WARM_UP + int(os.environ["BENCH_STEPS"]):
        for inputs, targets in loader:
            backward(cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            steps += 1


if __name__ == "__main__":
    LOOPS[sys.argv[1]][0]()
