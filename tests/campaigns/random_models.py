"""Train random models, and report each that trains something else than a plain loop, unannounced.

`PYTHONPATH=.:tests/helpers python tests/campaigns/random_models.py --models 500` trains 500 models
on two ranks: under ddp, a zero strategy and a mesh of split or staged layers. A model is made of
pieces: shared, frozen, unused and conditional layers, odd weights, buffers, counters, modes, inputs
changed in place; with a random loss, optimizer, micro-batch and batch. Each run must equal a plain
loop, be refused by a sentence, or print a warning. A case depends on its number and the seed alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from random_pieces import PIECES, PLAIN, WIDTH, Balanced, Residual
from ranks import leave_out_operations, logged_steps, together
from torch import nn
from torch.nn import functional

from rollcall.config import ConfigError, parse
from rollcall.messages.refusal import RankError
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.train import training
from rollcall.train.data.order import Order
from rollcall.train.data.source import InMemory, Source
from rollcall.train.ranks.signals import StopSignals
from rollcall.train.ranks.world import World
from rollcall.train.weights.deferred import Draws

CLASSES, ROWS, HELD, STEPS, RANKS = 4, 40, 10, 6, 2
AT_ONCE = 5
QUICK = "quick"
"""A file in the folder of runs that count no operations, which takes a third of their time."""
ABORTED, ALONE = "aborted", "refused by one rank"
CLOSE = 2e-5
"""The largest relative difference of losses that rounding may cause after some steps."""
STRATEGIES = ("ddp", "zero", "mesh")
ADDED = "cross_entropy", "ignored", "weighted", "learned", "whole", "decayed"
"""Losses of a batch that are the sums of those of its micro-batches."""
DEPENDENT = {"Centered", "Counting", "Deviation", "Momentum", "Quantized", "Turning"}
"""Pieces of a model whose results depend on the samples beside them, or on how many there were."""


class Random(nn.Module):
    """The model of a number."""

    def __init__(self, number: int, seed: int = 0) -> None:
        super().__init__()
        chance = random.Random(f"model {seed} {number}")
        kinds = [chance.choice(PLAIN if chance.random() < 0.6 else PIECES) for _ in range(3)]
        kinds[chance.randrange(3)] = PIECES[number % len(PIECES)]  # all of them have their turn
        self.blocks = nn.Sequential(*(kind(chance) for kind in kinds))
        self._share(chance.random())
        self.adds = chance.random() < 0.2  # something that the layers of a pipeline lack
        self.head = nn.Linear(WIDTH, CLASSES)
        splits = {
            f"blocks.{n}.{name}": how
            for n, kind in enumerate(kinds)
            if issubclass(kind, Residual)
            for name, how in (("inner", "columns"), ("down", "rows"))
        }
        self.tensor_plan = splits or None

    def _share(self, kind: float) -> None:
        """Use the first block once more as the last one, or one of its weights."""
        first, last = (getattr(self.blocks[number], "inner", None) for number in (0, 2))
        if kind < 0.08:
            self.blocks[2] = self.blocks[0]
        elif (
            kind < 0.16
            and type(first) is type(last) is nn.Linear
            and all("weight" in dict(layer.named_parameters()) for layer in (first, last))
        ):
            last.weight = first.weight

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.blocks(x)
        out: torch.Tensor = self.head(hidden + 0.1 * x if self.adds else hidden)
        return out

    def pipeline_layers(self) -> dict[str, nn.Module]:
        blocks = {f"blocks.{number}": block for number, block in enumerate(self.blocks)}
        return {**blocks, "head": self.head}


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS + HELD, WIDTH, generator=drawn)
    y = (x @ torch.randn(WIDTH, CLASSES, generator=drawn)).argmax(1)
    return x, y


def data(ignored: bool = False) -> Source:
    x, y = rows()
    if ignored:
        y[::3] = -100
    parts = InMemory(x[:ROWS], y[:ROWS]), InMemory(x[ROWS:], y[ROWS:])
    return Source(*parts, shape=(WIDTH,), classes=CLASSES)


def each(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def weighted(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = 1.0 + targets
    return each(outputs, targets) * weights, weights


def contrastive(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    z = functional.normalize(outputs, dim=1)
    near = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e4)
    same = (targets[:, None] == targets) & ~torch.eye(len(z), dtype=torch.bool)
    return -(near.log_softmax(1) * same).sum(1) / same.sum(1).clamp(min=1)


def relative(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = each(outputs, targets)
    return losses.square() / losses.detach().mean()


class Learned(nn.Module):
    """A loss with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.heat = nn.Parameter(torch.tensor(0.3))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return each(outputs * self.heat.exp(), targets)


class Running:
    """A loss that is divided by a running mean."""

    mean = 1.0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = each(outputs, targets)
        if losses.requires_grad:
            self.mean = 0.9 * self.mean + 0.1 * float(losses.detach().mean())
        return losses / self.mean


def whole(model: nn.Module, batch: Any) -> Any:
    losses = each(model(batch[0]), batch[1])
    return losses.sum(), len(losses)


def decayed(model: nn.Module, batch: Any) -> Any:
    losses, count = whole(model, batch)
    return losses + 0.01 * count * sum(w.square().sum() for w in model.parameters()).real, count


def constant(model: nn.Module, batch: Any) -> Any:
    losses, count = whole(model, batch)
    return losses + 0.1 * sum(w.abs().sum() for w in model.parameters()), count


def auxiliary(model: nn.Module, batch: Any) -> Any:
    losses, count = whole(model, batch)
    extra = sum(part.extra for part in model.modules() if isinstance(part, Balanced))
    return losses + 0.1 * extra, count


class Hierarchical(nn.Module):
    """A loss with weights for rare classes, which some batches do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.AdaptiveLogSoftmaxWithLoss(CLASSES, CLASSES, cutoffs=[1, 2], div_value=1.0)
        for weight in self.parameters():  # the loop by hand has another moment to draw it
            weight.data = torch.linspace(-1, 1, weight.numel()).cos().view_as(weight)

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return -self.inner(outputs, targets).output


class Shrinking(torch.optim.Optimizer):
    """An optimizer of the user's: a rate by the norm, by its own count, or neither."""

    def __init__(self, params: Any, lr: float = 0.1, kind: str = "") -> None:
        super().__init__(params, {"lr": lr})
        self.kind, self.count = kind, 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        self.count += 1
        for group in self.param_groups:
            for weight in (one for one in group["params"] if one.grad is not None):
                rate = group["lr"]
                rate *= min(1.0, float(weight.norm())) if self.kind == "norm" else 1
                rate /= self.count if self.kind == "count" else 1
                step, state = weight.grad, self.state[weight]
                if self.kind in ("rows", "columns") and step.ndim == 2:
                    step = step - step.mean(int(self.kind == "rows"), keepdim=True)
                if self.kind == "start":  # is pulled to where it began
                    state.setdefault("start", weight.clone())
                    step = step + weight - state["start"]
                if self.kind == "slow":  # every second step goes half the way
                    state.setdefault("slow", weight.clone())
                    state["steps"] = state.get("steps", 0) + 1
                weight.sub_(step, alpha=rate)
                if self.kind == "slow" and state["steps"] % 2 == 0:
                    weight.copy_(state["slow"].lerp_(weight, 0.5))


def _by_format(weights: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Group weights as rollcall does: Adafactor's epsilon is that of the first one in a group."""
    formats = dict.fromkeys(weight.dtype for weight in weights)
    return [{"params": [w for w in weights if w.dtype == format]} for format in formats]


LOSSES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "cross_entropy": (each, []),
    "ignored": (each, ["data.args.ignored=true"]),
    "weighted": (weighted, ["train.loss=random_models:weighted"]),
    "contrastive": (contrastive, ["train.loss=random_models:contrastive"]),
    "gathered": (contrastive, ["train.loss=random_models:contrastive", "train.gather=true"]),
    "relative": (relative, ["train.loss=random_models:relative"]),
    "learned": (Learned, ["train.loss=random_models:Learned"]),
    "running": (Running, ["train.loss=random_models:Running"]),
    "whole": (whole, ["train.loss=random_models:whole"]),
    "decayed": (decayed, ["train.loss=random_models:decayed"]),
    "constant": (constant, ["train.loss=random_models:constant"]),
    "auxiliary": (auxiliary, ["train.loss=random_models:auxiliary"]),
    "hierarchical": (Hierarchical, ["train.loss=random_models:Hierarchical"]),
}
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], list[str]]] = {
    "sgd": (lambda w: torch.optim.SGD(w, 0.1, 0.9), ["optim.name=sgd"]),
    "adamw": (lambda w: torch.optim.AdamW(w, 0.1, eps=0.1, weight_decay=0), ["optim.args.eps=0.1"]),
    "adagrad": (lambda w: torch.optim.Adagrad(w, 0.1, eps=0.1), ["optim.args.eps=0.1"]),
    "nadam": (lambda w: torch.optim.NAdam(w, 0.1, eps=0.1), ["optim.args.eps=0.1"]),
    "adafactor": (
        lambda w: torch.optim.Adafactor(_by_format(w), 0.1),
        ["optim.name=Adafactor"],
    ),
}
OPTIMIZERS["adagrad"][1].append("optim.name=Adagrad")
OPTIMIZERS["nadam"][1].append("optim.name=NAdam")
for kind in ("own", "norm", "count", "rows", "columns", "start", "slow"):
    words = ["optim.name=random_models:Shrinking", f"optim.args.kind={kind}"]
    OPTIMIZERS[kind] = partial(Shrinking, kind=kind), words
WORDS = [
    *("digits", "device=cpu", "data.name=random_models:data", "model.name=random_models:Random"),
    *(f"train.steps={STEPS}", "log.every=1", "optim.lr=0.1", "optim.weight_decay=0"),
    *("optim.schedule=constant", "optim.warmup_steps=0", "train.evaluate_every=null"),
]


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained."""

    number: int
    seed: int
    loss: str
    optimizer: str
    batch: int
    micro_batch: int | None
    clip: float | None
    zero: str
    mesh: str
    keys: tuple[str, ...]  # which change nothing
    resumes: bool  # in the middle, on one rank

    @classmethod
    def of(cls, number: int, seed: int) -> Case:
        """Return the case of a number."""
        chance = random.Random(f"case {seed} {number}")
        losses, optimizers = [*LOSSES], [*OPTIMIZERS]
        keys = ["model.activation_checkpointing=blocks"] * (chance.random() < 0.2)
        keys += ["parallel.conditional=blocks.*"] * (chance.random() < 0.15)
        meshes = "tensor" if Random(number, seed).tensor_plan else "pipeline", "pipeline"
        return cls(
            number,
            seed,
            "cross_entropy" if chance.random() < 0.5 else chance.choice(losses),
            "sgd" if chance.random() < 0.5 else chance.choice(optimizers),
            chance.choice([6, 7, 8]),
            chance.choice([None, None, 1, 2]),
            chance.choice([None, 0.5]),
            chance.choice(["zero3", "zero3", "zero2", "zero1"]),
            chance.choice(meshes),
            tuple(keys),
            chance.random() < 0.3,
        )

    def words(self, strategy: str) -> list[str]:
        """Return the command line."""
        words = [*WORDS, f"model.args.number={self.number}", f"model.args.seed={self.seed}"]
        words += [*LOSSES[self.loss][1], *OPTIMIZERS[self.optimizer][1], *self.keys]
        words += [
            f"data.global_batch={self.batch}",
            f"data.micro_batch={self.micro_batch or 'null'}",
        ]
        words += [f"optim.clip_norm={self.clip or 'null'}"]
        if strategy == "mesh" and self.mesh == "pipeline" and self.micro_batch is None:
            words += ["data.micro_batch=2"]
        chosen = {"ddp": "ddp", "zero": self.zero, "mesh": self.mesh}[strategy]
        return [*words, f"parallel.strategy={chosen}"]

    def by_hand(self, size: int) -> list[float]:
        """Return the losses of a plain loop with micro-batches, and then of the validation."""
        with Draws(0):
            model = Random(self.number, self.seed)
        x, y = rows()
        if self.loss == "ignored":
            y[::3] = -100
        function = LOSSES[self.loss][0]
        loss = function() if isinstance(function, type) else function
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        trained += loss.parameters() if isinstance(loss, nn.Module) else []
        optimizer = OPTIMIZERS[self.optimizer][0](trained)
        order, losses = Order(ROWS, STEPS * self.batch, self.batch, seed=0), []
        for step in range(STEPS):
            chosen = torch.tensor(order.samples(step, range(self.batch))[0])
            optimizer.zero_grad()
            total = count = 0.0
            for part in (chosen[start : start + size] for start in range(0, self.batch, size)):
                sums = self._sums(loss, model, x[part], y[part])
                (sums[0] / self.batch).backward()
                total, count = total + sums[0].item(), count + float(sums[1])
            for weight in trained:
                if weight.grad is not None and count != self.batch:
                    weight.grad *= self.batch / count
            if self.clip:
                nn.utils.clip_grad_norm_(trained, self.clip)
            optimizer.step()
            losses.append(total / count)
        model.eval()
        if self.loss == "gathered":  # an evaluation does not gather
            return losses
        with torch.no_grad():
            total, count = self._sums(loss, model, x[ROWS:].clone(), y[ROWS:])
            return [*losses, float(total / count)]

    @property
    def sizes(self) -> list[int]:
        """The micro-batches of loops that are all right, since a weight of 16 bits rounds sums.

        Where rounding gives it another neighbour, losses differ by far more than those of fp32 do.
        """
        model = Random(self.number, self.seed)
        is_short = any(w.requires_grad and w.dtype.itemsize < 4 for w in model.parameters())
        is_short &= not DEPENDENT.intersection(type(layer).__name__ for layer in model.modules())
        share = -(-self.batch // RANKS)
        return [self.batch, *((share, 2, 1) if is_short and self.loss in ADDED else ())]

    def _sums(
        self, loss: Callable[..., Any], model: nn.Module, x: torch.Tensor, y: torch.Tensor
    ) -> Any:
        if self.loss in ("whole", "decayed", "constant", "auxiliary"):
            return loss(model, (x, y))
        result = loss(model(x), y)
        losses, weights = result if isinstance(result, tuple) else (result, (y != -100).float())
        return losses.sum(), weights.sum()


def do_all(rank: int, folder: Path) -> None:
    """Be a rank that trains all cases, and notes how each ends."""
    world = World.join("cpu")
    if (folder / QUICK).exists():
        leave_out_operations()
    for name, words in json.loads((folder / "cases.json").read_text()).items():
        printed = io.StringIO()
        _note(rank, folder, name, ABORTED, "", "")
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            end = _end(words, world, name, folder)
        _note(rank, folder, name, *end, printed.getvalue())
        if end[0] in ("failed", ABORTED, ALONE):  # the other rank may be anywhere
            sys.exit(1)
    world.leave()


def _note(rank: int, folder: Path, *what: str) -> None:
    with (folder / f"ends-{rank}.jsonl").open("a") as ends:
        ends.write(json.dumps(what) + "\n")


def _end(words: list[str], world: World, name: str, folder: Path) -> tuple[str, str]:
    try:
        _, config = parse([*words, f"run.root={folder}", f"run.name={name}"])
        with StopSignals() as signals:
            return str(training.train("digits", config, world, signals)), ""
    except ConfigError as error:
        return ALONE if isinstance(error, RankError) else "refused", str(error)
    except Exception as error:
        is_peer = "Connection reset" in str(error) or "Connection closed" in str(error)
        return ABORTED if is_peer else "failed", traceback.format_exc()


def _train(ranks: int, plan: Mapping[str, Sequence[str]], folder: Path) -> dict[str, list[str]]:
    """Train these command lines; return how each ended, its reason, and what it printed."""
    ends: dict[str, list[str]] = {}
    for path in folder.glob("ends-*"):
        path.unlink()
    tried: Counter[str] = Counter()
    while rest := [name for name in plan if name not in ends]:
        (folder / "cases.json").write_text(json.dumps({name: plan[name] for name in rest}))
        with contextlib.suppress(AssertionError):  # a rank was killed
            together(ranks, do_all, folder)
        lines, *others = (
            [*map(json.loads, path.read_text().splitlines())]
            for path in sorted(folder.glob("ends-*"))
        )
        if lines[-1][1] == ABORTED:  # a rank that lost no other one knows the reason
            lines[-1:] = [other[-1] for other in others if other[-1][1] != ABORTED] or lines[-1:]
        name, end, *_ = lines[-1]
        if end == ABORTED and not tried[name]:  # there may only have been too little time
            tried[name] += 1
            shutil.rmtree(folder / name, ignore_errors=True)
            lines = [line for line in lines if line[0] != name]
        ends |= {name: more for name, *more in lines}
    return ends


def check(cases: Sequence[Case], folder: Path) -> dict[str, str]:
    """Return how each case ended with each strategy: equal, refused, warned, failed or wrong."""
    runs = {f"{case.number}-{way}": (case, way) for case in cases for way in STRATEGIES}
    words = {name: case.words(strategy) for name, (case, strategy) in runs.items()}
    half, resumed = (
        [f"train.steps={STEPS // 2}"],
        {n for n, (case, _) in runs.items() if case.resumes},
    )
    ends = _train(RANKS, {n: [*words[n], *(half if n in resumed else [])] for n in runs}, folder)
    again = {n: [*words[n], "parallel.strategy=single"] for n in resumed if ends[n][0] == "done"}
    for name, (end, reason, text) in _train(1, again, folder).items():
        ends[name] = [end, reason, ends[name][2] + text]
    expected = {case.number: _tried(case) for case in cases}
    return {
        name: _judge(ends[name], RunDir(folder, name), expected[case.number], case.resumes)
        for name, (case, _) in runs.items()
    }


def _tried(case: Case) -> list[list[float]]:
    """Return the losses of plain loops; none if torch itself cannot train the model."""
    try:
        return [case.by_hand(size) for size in case.sizes]
    except Exception:  # of a model of any kind
        traceback.print_exc()
        return []


def _judge(
    end: Sequence[str], run: RunDir, loops: Sequence[Sequence[float]], is_resumed: bool
) -> str:
    state, reason, printed = end
    if not loops:
        return f"not judged: {state}: {reason}"
    if state != "done":
        return f"{state}: {reason}"
    losses = [line["loss"] for line in logged_steps(run)]
    losses += [line["val_loss"] for line in read_lines(run.metrics) if "val_loss" in line][-1:]
    losses = losses[: len(loops[0])]
    error = min(_error(losses, expected) for expected in loops)
    if len(losses) == len(loops[0]) and error <= CLOSE:
        return f"equal: {error:.1e}"
    notes = "rollcall: warning: ", "training changes" if is_resumed else "once in each micro-batch"
    warnings = [line for line in printed.splitlines() if any(note in line for note in notes)]
    warnings = [line for line in warnings if "flops_per_second" not in line]
    return f"{'warned' if warnings else 'wrong'}: {error:.1e} {'; '.join(warnings)}"


def _error(losses: Sequence[float], expected: Sequence[float]) -> float:
    pairs = zip(losses, expected, strict=False)
    return max(abs(ours - theirs) / (abs(theirs) + 1e-3) for ours, theirs in pairs)


BAD = "wrong", "failed"  # layers that ranks use differently may abort in gloo: docs/checks.md


def main() -> int:
    """Try the models that the command line asks for; return 1 if one of them is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print how each model ended")
    parser.add_argument("--quick", action="store_true", help="count no operations, a third of it")
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    for first in range(given.first, given.first + given.models, AT_ONCE):
        last = min(first + AT_ONCE, given.first + given.models)
        cases = [Case.of(number, given.seed) for number in range(first, last)]
        with tempfile.TemporaryDirectory() as folder:
            if given.quick:
                Path(folder, QUICK).touch()
            ends = check(cases, Path(folder))
        for name, end in ends.items():
            kind = end.partition(":")[0]
            counts[kind] += 1
            if given.verbose or kind in (*BAD, ABORTED):
                case = cases[int(name.partition("-")[0]) - first]
                pieces = [type(piece).__name__ for piece in Random(case.number, case.seed).blocks]
                print(f"{name} {' '.join(pieces)} {asdict(case)}\n    {end}", flush=True)
        print(f"{last} models: {dict(counts)}", flush=True)
    return int(any(counts[kind] for kind in BAD))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
