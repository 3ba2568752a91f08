"""The memory of a training step of gpt, counted on fake tensors, against the planner's forms."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map

from rollcall.config import parse
from rollcall.tools.plan import memory
from rollcall.tools.plan import own_model as plan_model
from rollcall.tools.plan.layout import Layout, Terms
from rollcall.tools.plan.machine import Machines
from rollcall.train import models
from rollcall.train.data import sets
from rollcall.train.data.order import validation_batches
from rollcall.train.numerics import losses, optim
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.world import Place, World

# Of a shortcut for the weights of samples, which a CPU looks at.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
CPU = torch.device("cpu")
WORDS = [
    *("gpt", "data.name=synthetic_tokens", "data.seq_len=64", "data.num_classes=512"),
    *("model.hidden_size=256", "model.num_heads=8", "model.num_kv_heads=8"),
    *("optim.name=adamw", "optim.implementation=single"),  # foreach's temporaries count as state
]
ROWS, LAYERS = 4, 2
BLOCKS = "model.activation_checkpointing=blocks"
SCATTERED = "parallel.reduce_scatter=micro-batch"
SEQUENCE = "parallel.sequence_parallel=true"
CASES: dict[str, dict[str, Any]] = {
    "parallel.strategy=single": {},
    f"parallel.strategy=single {BLOCKS}": {"recompute": "full"},
    "parallel.strategy=zero2": {"data": 8, "zero": 2},
    "parallel.strategy=zero3": {"data": 8, "zero": 3},
    f"parallel.strategy=zero3 {BLOCKS}": {"data": 8, "zero": 3, "recompute": "full"},
    "parallel.strategy=zero3 model.activation_checkpointing=selective": {
        **{"data": 8, "zero": 3},
        "recompute": "selective",
    },
    f"parallel.strategy=zero2 {SCATTERED}": {"data": 8, "zero": 2, "scattered": True},
    f"parallel.strategy=zero3 {SCATTERED}": {"data": 8, "zero": 3, "scattered": True},
    "parallel.strategy=tensor": {"tensor": 4},
    f"parallel.strategy=tensor {BLOCKS}": {"tensor": 4, "recompute": "full"},
    "parallel.strategy=single precision=bf16": {},
    "parallel.strategy=zero2 precision=bf16": {"data": 8, "zero": 2},
    "parallel.strategy=zero3 precision=bf16": {"data": 8, "zero": 3},
    f"parallel.strategy=tensor {SEQUENCE}": {"tensor": 4, "sequence": True},
}


class EnoughError(Exception):
    """What is in memory before the backward pass is known."""


class Watched(losses.Objective):
    """Keeps what was in memory between the forward and the backward pass."""

    def __init__(self, loss: losses.Loss, tracker: MemTracker, is_all: bool) -> None:
        super().__init__(loss)
        self.tracker, self.is_all = tracker, is_all
        self.between: dict[str, int] = {}

    def __call__(self, outputs: Any, targets: Any, counts: torch.Tensor) -> torch.Tensor:
        """Note the memory at the end of the forward pass."""
        total = super().__call__(outputs, targets, counts)
        self.between = now(self.tracker)
        if self.is_all:
            raise EnoughError
        return total


class Counted(Strategy):
    """Lets the tracker see several passes of a module; by itself it refuses the second."""

    tracker: MemTracker

    def _around(self, last: bool) -> AbstractContextManager[Any]:
        self.tracker.reset_mod_stats()
        return super()._around(last)


def now(tracker: MemTracker) -> dict[str, int]:
    """Return the bytes by kind."""
    found = tracker.get_tracker_snapshot()[CPU]
    return {getattr(kind, "value", str(kind)): size for kind, size in found.items()}


def counted(
    words: str,
    layout: Layout,
    rows: int,
    layers: int,
    micro_batches: int = 1,
    before_backward: bool = False,
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes before the last backward pass, and after the step, or those before alone."""
    config = parse([*WORDS, *words.split(), f"model.num_layers={layers}"])[1]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.ranks)
    try:
        place = Place("plan", world_size=layout.ranks, local_world_size=layout.ranks)
        source = sets.load(config.data, world := World(place, CPU))
        batch = next(validation_batches(source, rows, 0, 1))
        tracker = MemTracker()
        objective = Watched(losses.of(config), tracker, before_backward)
        strategy = Counted(config, world, objective)
        strategy.tracker = tracker
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = tree_map(lambda x: mode.from_tensor(x) if torch.is_tensor(x) else x, batch)
            fake = fake._replace(weights=batch.weights)  # whose values are looked at
            model = models.maker(config, source, CPU)()
            model.to = lambda _: model  # type: ignore[method-assign,assignment]  # refuses fakes
            strategy.place(model, fake)
            model.eval()  # in training, a number is drawn for the dropout of tensor ranks
            optimizer = strategy.optimizer(lambda groups: optim.build(config.optim, [*groups]))
            tracker.track_external(strategy.model, optimizer)
            with tracker:
                try:
                    strategy.forward_backward([fake] * micro_batches, rows * micro_batches)
                except EnoughError:
                    return objective.between, {}
                optimizer.step()
                return objective.between, now(tracker)
    finally:
        dist.destroy_process_group()


def planned(words: str, layers: int, micro_batches: int = 1) -> tuple[Layout, Terms]:
    """Return the layout of a case, and what the planner says of the memory of a rank."""
    config = parse([*WORDS, *words.split(), f"model.num_layers={layers}"])[1]
    degrees = {"precision": config.precision, "sequence": False, **CASES[words]}
    batch = ROWS * micro_batches * degrees.get("data", 1)
    layout = Layout(**degrees, micro=ROWS, batch=batch)
    return layout, memory.of(plan_model.describe(config), layout, Machines().machine("h100"))


def of_a_cpu(layout: Layout) -> float:
    """Return the bytes of a layer that other kernels than a GPU's keep.

    Norms keep the normalized inputs, and a copy in 32 bits of inputs that FSDP has cast. Attention
    keeps a copy of its result.
    """
    row = ROWS * 64 * 256 if layout.recompute == "none" else 0
    norms = 2 * (4 + (2 if layout.zero and layout.width == 2 else 0))
    pieces = layout.tensor if layout.sequence else 1
    return norms * row / pieces + layout.width * row / layout.tensor


@pytest.mark.parametrize(
    "words",
    [
        words if "zero3" in words else pytest.param(words, marks=pytest.mark.long)
        for words in CASES
        if SCATTERED not in words
    ],
)
def test_a_step_holds_what_the_closed_forms_say(words: str) -> None:
    """Memory before the backward pass that grows with the rows is activations; the rest weights."""
    layout, terms = planned(words, LAYERS)
    between, after = counted(words, layout, ROWS, LAYERS)

    def total(rows: int, layers: int) -> int:
        return counted(words, layout, rows, layers, before_backward=True)[0]["Total"]

    rows = total(2 * ROWS, LAYERS) - between["Total"]
    fewer_rows = total(2 * ROWS, LAYERS - 1) - total(ROWS, LAYERS - 1)
    # The backward pass begins with the head; under tensor, the loss has computed its gradient.
    head = layout.width * 512 * 256 if layout.zero == 3 else 0
    head = 4 * 512 * 256 // layout.tensor if layout.tensor > 1 else head
    held = {
        "weights": between["Total"] - rows - between["Buffer"] - head,
        # What the tracker calls an activation after the step is a divided embedding's gradient.
        "gradients": after["Gradient"] + after["Activation"],
        "optimizer state": after["Optstate"],
        "activations": rows - fewer_rows - of_a_cpu(layout),
    }
    terms["activations"] -= planned(words, LAYERS - 1)[1]["activations"]
    assert held == pytest.approx({name: terms[name] for name in held}, rel=0.03)


def test_no_more_outputs_than_exist_at_once() -> None:
    words = ["data.seq_len=8192", "data.num_classes=128256", "precision=bf16"]
    model = plan_model.describe(parse([*WORDS, *words])[1])
    layout = Layout(precision="bf16", micro=1, batch=1)
    terms = [
        memory.of(model, layout, Machines().machine("h100", software=name))["outputs and loss"]
        for name in ("rollcall", "torchtitan")
    ]
    whole = 8192 * 128256
    assert terms[0] < 4 * 2**27 + 4 * 256 * 128256 + 2**25 < 4 * whole < terms[1]


@pytest.mark.long
@pytest.mark.parametrize("words", [w for w in CASES if "zero" in w and BLOCKS not in w])
def test_gradients_stay_whole_until_the_last_micro_batch(words: str) -> None:
    """Unless each micro-batch scatters them."""
    layout, terms = planned(words, LAYERS, micro_batches=2)
    between, _ = counted(words, layout, ROWS, LAYERS, micro_batches=2)
    # The tracker calls the gradients of the weights outside of blocks temporary.
    assert between["Gradient"] + between["Temp"] == pytest.approx(terms["gradients"], rel=0.03)
