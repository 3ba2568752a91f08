"""The same training as loops of several kinds, each timed by its model.

Every loop trains on scikit-learn's digits with the same model, global batch, loss and fused AdamW,
and takes its batches by index from memory, if no DataLoader is named. The model notes wall and CPU
time, so only steps are measured, with all that a loop does between two of them.
"""

import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from rollcall.config.schema import Data, Model
from rollcall.tools.bench import turns
from rollcall.train.data.sets.digits import digits
from rollcall.train.data.source import BatchDataset, Source
from rollcall.train.models.cnn import cnn
from rollcall.train.models.mlp import mlp
from rollcall.train.ranks.device import synchronize
from rollcall.train.ranks.world import World

BATCH = 64
"""Samples of a step, over all ranks."""
SAMPLES = 1438
"""Samples to train on."""
RATE = 1e-3
WARM_UP = 100
"""Steps before the clock starts."""


def transformer(config: Model, source: Source) -> nn.Module:
    """Return two blocks that see the rows of an image as tokens."""
    _, height, width = source.shape
    size = config.hidden_size
    block = partial(nn.TransformerEncoderLayer, size, 4, 2 * size, dropout=0.0, batch_first=True)
    layers = [nn.Unflatten(1, (height, width)), nn.Linear(width, size), block(), block()]
    return nn.Sequential(
        nn.Flatten(), *layers, nn.Flatten(), nn.Linear(height * size, source.classes)
    )


MODELS: dict[str, Callable[[Model, Source], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
}


class Settings(NamedTuple):
    """The settings of a loop."""

    model: str
    steps: int  # that are timed
    batch: int = BATCH  # samples of a step, over all ranks
    strategy: str = "ddp"
    threads: int = 1  # of each rank
    device: str = "cpu"
    warm_up: int = WARM_UP
    folder: Path = Path()  # gets the result of each rank


given: list[Settings] = []
"""Of this process, which is a rank."""


def measure(name: str, settings: Settings, ranks: int, _: int = 0) -> turns.Figures:
    """Return the figures of one of LOOPS, per step, as means over its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        turns.on_ranks(partial(run, name, settings._replace(folder=place)), place, ranks)
        found = [json.loads(file.read_text()) for file in place.glob("rank-*")]
    return {key: statistics.fmean(each[key] for each in found) for key in found[0]}


def run(name: str, settings: Settings) -> None:
    """Be a rank of one of LOOPS."""
    given.append(settings)
    torch.set_num_threads(settings.threads)
    LOOPS[name][0]()


def _steps() -> int:
    return given[0].warm_up + given[0].steps


def timed_model(config: Model, source: Source) -> nn.Module:
    """Return the chosen model, which writes the times of its steps: a `model.name` for rollcall."""
    return _timed(MODELS[given[0].model](config, source))


def _timed(model: nn.Module) -> nn.Module:
    [settings] = given
    passes, begun = itertools.count(1), [0.0, 0.0]

    def note(module: nn.Module, _: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        number = next(passes)
        if number in (settings.warm_up, _steps()):
            synchronize(torch.device(given[0].device))
        now = time.perf_counter(), time.process_time()
        if number == settings.warm_up:
            begun[:] = now
        elif number == _steps():
            taken = [(end - begin) / settings.steps for begin, end in zip(begun, now, strict=True)]
            write(dict(zip(("wall", "CPU of a rank"), taken, strict=True)))

    model.register_forward_pre_hook(note)
    return model


def write(figures: turns.Figures) -> None:
    """Write what this rank has measured."""
    (given[0].folder / f"rank-{os.environ['RANK']}").write_text(json.dumps(figures))


def rollcall() -> None:
    """Train with rollcall, everything on that is on by default."""
    from rollcall.train.main import main

    [settings] = given
    words = ["data.name=digits", f"data.global_batch={settings.batch}"]
    words += [f"train.steps={_steps() + 1}", f"parallel.strategy={settings.strategy}"]
    words += ["model.name=rollcall.tools.bench.loops:timed_model", "model.hidden_size=64"]
    words += ["optim.name=adamw", f"optim.lr={RATE}", f"device={settings.device}"]
    words += ["checkpoint.every=null", "train.evaluate_every=null"]  # nor do the others
    code = main([*words, f"run.root={settings.folder / 'runs'}"])
    if code:
        raise SystemExit(code)


def bare(loads: bool = False) -> None:
    """Train with a loop of ten lines; several ranks use DistributedDataParallel."""
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks > 1 and not dist.is_initialized():
        World.join(given[0].device)
    _train(DistributedDataParallel if ranks > 1 else None, loads)


def sharded() -> None:
    """Train with the bare loop and FSDP2: a unit for each child that has weights, and the rest."""
    world = World.join(given[0].device)
    mesh = init_device_mesh(given[0].device, (world.world_size,))

    def wrap(model: nn.Module) -> nn.Module:
        for block in model.children():
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    _train(wrap)


def _train(wrap: Callable[[nn.Module], nn.Module] | None = None, loads: bool = False) -> None:
    model, optimizer, batches = _parts(wrap, loads)
    _steps_of(model, optimizer, batches, lambda loss: loss.backward())


def collectives() -> None:
    """Do the communication of a strategy's step with nothing beside it: one large message each."""
    [settings] = given
    world = World.join(settings.device)
    count = sum(weight.numel() for weight in _parts()[0].parameters())
    whole = torch.zeros(-(-count // world.world_size) * world.world_size, device=world.device)
    own = whole.chunk(world.world_size)[world.rank].clone()
    for step in range(_steps()):
        if step == settings.warm_up:
            synchronize(torch.device(given[0].device))
            began = time.perf_counter()
        for message in MESSAGES[settings.strategy]:
            message(whole, own)
    synchronize(torch.device(given[0].device))
    write({"wall": (time.perf_counter() - began) / settings.steps})


def _all_reduce(whole: torch.Tensor, _: torch.Tensor) -> None:
    dist.all_reduce(whole)


def _reduce_scatter(whole: torch.Tensor, own: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(own, whole)


MESSAGES: dict[str, Sequence[Callable[[torch.Tensor, torch.Tensor], object]]] = {
    "ddp": (_all_reduce,),
    "zero1": (_all_reduce, lambda whole, _: dist.broadcast(whole, 0)),
    "zero2": (dist.all_gather_into_tensor, _reduce_scatter),
    "zero3": (dist.all_gather_into_tensor, dist.all_gather_into_tensor, _reduce_scatter),
}
"""The messages of a step: Rajbhandari et al., section 7, https://arxiv.org/abs/1910.02054."""


def bare_with_all_reduce() -> None:
    """Train with the bare loop and one empty all-reduce per step: the floor of any control."""
    World.join("cpu")
    numbers = torch.zeros(16)

    def reduce(module: nn.Module, _: Any) -> None:
        if isinstance(module, nn.Sequential):
            dist.all_reduce(numbers)

    nn.modules.module.register_module_forward_pre_hook(reduce)
    bare()


def accelerate(loads: bool = False) -> None:
    """Train with Hugging Face's accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, batches = _parts(loads=loads)
    model, optimizer = accelerator.prepare(model, optimizer)
    batches = accelerator.prepare(batches) if loads else batches
    _steps_of(model, optimizer, batches, accelerator.backward)


def fabric(loads: bool = False) -> None:
    """Train with Lightning Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", **_devices())
    fabric.launch()
    model, optimizer, batches = _parts(loads=loads)
    model, optimizer = fabric.setup(model, optimizer)
    batches = fabric.setup_dataloaders(batches) if loads else batches
    _steps_of(model, optimizer, batches, fabric.backward)


def lightning(loads: bool = False) -> None:
    """Train with Lightning's Trainer, without checkpoints."""
    import lightning

    model, optimizer, batches = _parts(loads=loads)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    trainer = lightning.Trainer(
        accelerator="cpu",
        **_devices(),
        max_steps=_steps(),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Module(), batches)


LOOPS: dict[str, tuple[Callable[[], None], str]] = {
    "bare": (bare, "torch"),
    "bare + all-reduce": (bare_with_all_reduce, "torch"),
    "rollcall": (rollcall, "torch"),
    "Fabric": (fabric, "lightning"),
    "accelerate": (accelerate, "accelerate"),
    "Lightning": (lightning, "lightning"),
    "FSDP2": (sharded, ""),
    "alone": (_train, ""),  # on this rank's share of each batch, beside the other ranks
    "collectives": (collectives, ""),
    "DataParallel": (partial(_train, nn.DataParallel), ""),  # one process, all GPUs
    "bare, DataLoader": (partial(bare, True), "torch"),
    "Fabric, DataLoader": (partial(fabric, True), "lightning"),
    "accelerate, DataLoader": (partial(accelerate, True), "accelerate"),
    "Lightning, DataLoader": (partial(lightning, True), "lightning"),
}
"""Each loop, and the package that it needs; without one, only other tables use it."""


def _devices() -> dict[str, Any]:
    """Return Lightning's words for the ranks of this loop."""
    ranks = int(os.environ["WORLD_SIZE"])
    return {"devices": ranks, "strategy": "ddp" if ranks > 1 else "auto"}


class Batches:
    """This rank's rows of each batch, taken by index from tensors; a new order for each epoch."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the inputs and targets of an epoch."""
        rank, ranks, batch = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), given[0].batch
        order = torch.randperm(len(self._tensors[0]))
        for start in range(0, len(order) - batch + 1, batch):
            chosen = order[start : start + batch].chunk(ranks)[rank]
            yield tuple(tensor[chosen] for tensor in self._tensors)


def _parts(
    wrap: Callable[[nn.Module], nn.Module] | None = None, loads: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return a timed model, its optimizer, and the batches of an epoch.

    They are this rank's, or with `loads` a DataLoader's of a rank's size.
    """
    torch.manual_seed(0)
    [settings] = given
    source = digits(Data(), cast(World, None))  # no rank is asked for these files
    batch = cast(BatchDataset, source.train).__getitems__(list(range(source.train_size)))
    model = MODELS[settings.model](Model(hidden_size=64), source).to(settings.device)
    model = _timed(wrap(model) if wrap else model)
    data = batch.inputs.to(settings.device), batch.targets.to(settings.device)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)
    if not loads:
        return model, optimizer, Batches(*data)
    share = settings.batch // int(os.environ["WORLD_SIZE"])
    loader = DataLoader(TensorDataset(*data), share, shuffle=True, drop_last=True)
    return model, optimizer, loader


def _steps_of(
    model: nn.Module, optimizer: Any, batches: Any, backward: Callable[[Any], object]
) -> None:
    """Train over the batches again and again until the clock has its result."""
    endless = itertools.chain.from_iterable(itertools.repeat(batches))
    for inputs, targets in itertools.islice(endless, _steps()):
        backward(cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
