"""`rollcall bench experts`: a step with a mixture of experts, beside a dense one of equal work.

All runs train the recipe gpt in turns; a rank has one thread.
A token passes the same number of weights in each. `plain torch` is a mixture written by hand, as a
loop.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from rollcall.cli.installation import TRAIN
from rollcall.config.schema import Model
from rollcall.messages.text import duration
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.tools.bench import turns
from rollcall.train.data.source import Source
from rollcall.train.models.gpt import gpt
from rollcall.train.parallel.experts import Experts, Perceptrons
from rollcall.train.ranks.measures import measure

STEPS = 20
HIDDEN, TOP_K = 512, 2
"""Units of the dense perceptron, and the experts of half as many that a token passes."""
ROUTING = "routing"
"""The measured seconds of a forward pass that experts spend on all but their products."""


def main(argv: Sequence[str]) -> int:
    """Measure and print the tables; return the exit code."""
    words = turns.parser("experts", __doc__, repeats=3)
    words.add_argument("--ranks", type=turns.count, nargs="*", default=[1, 2, 4], metavar="K")
    options = words.parse_args(argv)
    mixture = ["model.experts=8", f"model.top_k={TOP_K}", f"model.expert_size={HIDDEN // TOP_K}"]
    ours = [*mixture, f"model.name={__name__}:timed"]
    for ranks in options.ranks:
        ways = {
            "dense": [f"model.ffn_size={HIDDEN}"],
            "plain torch": [*mixture, f"model.name={__name__}:plain"],
            "experts": ours,
        }
        if ranks > 1:
            ways["experts, spread"] = [*ours, f"parallel.mesh=expert={ranks}"]
        runs = {name: partial(_run, ranks, keys) for name, keys in ways.items()}
        found = turns.take_turns(runs, options.repeats)
        base = turns.column(found["dense"], "step")
        rows = [("", "step", "/ dense", "routing and dispatch")]
        for name, measured in found.items():
            step, routing = (turns.column(measured, key) for key in ("step", ROUTING))
            share = turns.cell(turns.ratios(routing, step), "{:.1%}".format)
            times = turns.cell(step, duration), turns.cell(turns.ratios(step, base))
            rows.append((name, *times, share if any(routing) else "-"))
        turns.show(f"one step, gpt, ranks: {ranks}, medians of {options.repeats}, in turns", rows)
    return 0


def _run(ranks: int, keys: Sequence[str], _: int) -> turns.Figures:
    """Return the seconds of a step and of its routing, the medians of a run."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(folder, "run")
        words = ["gpt", "device=cpu", f"data.path={argparse.__file__}", f"train.steps={STEPS}"]
        words += ["train.evaluate_every=null", "log.every=1", *keys, *run.words]
        turns.timed(["env", "OMP_NUM_THREADS=1", *turns.torchrun(*TRAIN, *words, ranks=ranks)])
        lines = [line for line in read_lines(run.metrics) if "loss" in line]
    seconds = [after["time"] - before["time"] for before, after in pairwise(lines)]
    routing = [line.get(ROUTING, 0) for line in lines]
    return {"step": statistics.median(seconds), ROUTING: statistics.median(routing)}


class Plain(nn.Module):
    """A mixture as most people write it."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, number, bias=False)
        linear, hidden = partial(nn.Linear, bias=False), HIDDEN // TOP_K
        experts = (
            nn.Sequential(linear(width, hidden), nn.GELU(), linear(hidden, width))
            for _ in range(number)
        )
        self.perceptrons = nn.ModuleList(experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (…, width) to the same shape."""
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(TOP_K)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(tokens)
        for number, perceptron in enumerate(self.perceptrons):
            rows, which = (chosen == number).nonzero(as_tuple=True)
            y = y.index_add(0, rows, perceptron(tokens[rows]) * weights[rows, which, None])
        return y.view_as(x)


def plain(config: Model, source: Source) -> nn.Module:
    """Return gpt with mixtures written by hand."""
    model = gpt(config, source)
    for block in model.modules():
        if isinstance(layer := getattr(block, "experts", None), Experts):
            block.experts = Plain(layer.number, layer.router.in_features)
    return model


def timed(config: Model, source: Source) -> nn.Module:
    """Return gpt with experts that measure how long they route and send tokens."""
    model, clock = gpt(config, source), list[float]()

    def begin(*_: object) -> None:
        clock.append(time.perf_counter())

    def end(*_: object) -> None:
        clock.append(time.perf_counter())
        if len(clock) == 4:  # of a layer, with its perceptrons in the middle
            taken = clock[1] - clock[0] + clock[3] - clock[2]
            measure(ROUTING, taken / dist.get_world_size(), "sum")
            clock.clear()

    for module in model.modules():
        if isinstance(module, Experts | Perceptrons):
            module.register_forward_pre_hook(begin)
            module.register_forward_hook(end)
    return model
