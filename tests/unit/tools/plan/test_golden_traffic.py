"""What every cell of tests/golden/traffic.txt sends, against the planner's closed forms.

gloo has no reduce-scatter: FSDP and DTensor use an all-reduce of the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import planned_traffic as planned
import pytest
import torch
import traffic
from planned_traffic import Messages, Sized
from torch import nn

from rollcall.config import Config, parse
from rollcall.config.checks import LOOPED
from rollcall.tools.plan import own_model as plan_model
from rollcall.tools.plan.layout import Layout
from rollcall.tools.plan.model import HALF, Attention, Model
from rollcall.train import models
from rollcall.train.data import sets
from rollcall.train.parallel import pipeline, replicate
from rollcall.train.parallel.layers import balance, groups_of
from rollcall.train.parallel.shard import units
from rollcall.train.ranks.world import Place, World
from tests.multi.train.parallel.test_strategies import ROUTED, RUNS

PADDING = 5e-3
"""FSDP pads a weight that does not divide: of digits, ten classes on four ranks."""
LINE = re.compile(r"(\w+)\[(\d+) ranks(?:, every (\d+))?\] ([\d,]+) B \w+")
POINT = re.compile(r"(send|receive) (?:to|from) rank([+-]\d+) ([\d,]+) B \w+")
SHARED, UNUSED = 32, 12
"""Values of a block of `odd`: the norm's weights that two places share, and the unused ones."""
KEY = 32 * 16
"""Values of the frozen weight of its second block."""


class Rank(NamedTuple):
    """The messages of the ranks of a line of the golden file, and the distances of their peers."""

    number: int
    sent: Messages
    peers: set[int]


def lines(text: str) -> Iterator[str]:
    """Yield the messages of a line of the golden file; repeated ones come repeatedly."""
    text = text.strip()
    if match := re.match(r"(\d+) × ", text):
        for _ in range(int(match[1])):
            inner = text[match.end() :]
            for one in parts(inner[1:-1]) if inner.startswith("(") else [inner]:
                yield from lines(one)
    else:
        yield text


def parts(text: str) -> list[str]:
    """Split at the semicolons outside of brackets."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == ";" and not depth:
            found.append("")
        else:
            found[-1] += letter
    return found


@cache
def golden() -> dict[str, list[Rank]]:
    """Return what the ranks of each cell send; an all-gather counts as what it returns.

    Without experts: how many tokens travel to them is not in the file. And without gradients that
    are scattered after each micro-batch, which the planner does not know.
    """
    found: dict[str, list[Rank]] = {}
    for name, text in traffic.sections(traffic.GOLDEN.read_text()).items():
        if name.partition(":")[0] in ROUTED or name.endswith("scattered"):
            continue
        ranks = found.setdefault(name, [])
        for line in text[1:]:
            if not line.startswith("    "):
                [number, *_] = re.findall(r"\d+", line)
                ranks.append(Rank(int(number), Messages(), set()))
            else:
                for one in lines(line):
                    _add(ranks[-1], one)
    return found


def _add(rank: Rank, line: str) -> None:
    if match := POINT.fullmatch(line):
        rank.peers.add(abs(int(match[2])))
        rank.sent.add(match[1], 2, 1, 1, int(match[3].replace(",", "")))
        return
    match = LINE.fullmatch(line)
    assert match, line
    kind, ranks = match[1].replace("_", "-"), int(match[2])
    size = int(match[4].replace(",", "")) * (ranks if kind == "all-gather" else 1)
    rank.sent.add(kind, ranks, int(match[3] or 1), 1, size)


def layout_of(config: Config, ranks: int) -> Layout:
    """Return how a cell lies on its ranks, two on each node."""
    degrees = config.parallel.degrees(ranks, min(ranks, 2))
    shard, replicas = degrees.get("shard", 1), degrees.get("replicate", 1)
    share = -(-config.data.global_batch // (shard * replicas))
    given = config.data.micro_batch
    return Layout(
        data=shard * replicas,
        tensor=degrees.get("tensor", 1),
        stages=degrees.get("pipeline", 1),
        context=degrees.get("context", 1),
        zero=config.parallel.stage if shard > 1 else 0,
        shard=shard if replicas > 1 and shard > 1 else 0,
        sequence=config.parallel.sequence_parallel,
        micro=min(given, share) if isinstance(given, int) else share,
        batch=share * shard * replicas,
        recompute="full" if config.model.activation_checkpointing == "blocks" else "none",
        precision=config.precision,
    )


@cache
def _world() -> World:
    return World(Place("plan", world_size=1, local_world_size=1), torch.device("cpu"))


def _built(config: Config) -> tuple[nn.Module, torch.Tensor]:
    source = sets.load(config.data, _world(), config.seed)
    rows = source.train.__getitems__([0])  # type: ignore[attr-defined]
    return models.build(config.model, source), rows.inputs


def gpt_parts(model: Model) -> list[Sized]:
    """Return the layers of gpt, which a pipeline divides before the head."""
    first, *layers, last = Sized.of(model)
    norm = replace(last, weights=last.weights - last.cut_weights, outputs=0, messages=0)
    norm = replace(norm, cut_weights=0, products=(), tensors=1, cut_tensors=0, units=1)
    head = replace(last, weights=last.cut_weights, tensors=1, units=1)
    return [first, *layers, norm, head]


def odd_parts(whole: list[Sized], tied: bool, used: bool) -> tuple[list[Sized], list[Sized]]:
    """Return the layers of `odd` or `tied`, and those without frozen weights.

    With `used`, weights that the loss does not use have no gradient either.
    """
    block = replace(whole[1], weights=whole[1].weights - SHARED, tensors=whole[1].tensors - 1)
    more = replace(block, weights=block.weights + UNUSED, tensors=block.tensors + 2)
    # Tensor ranks hold all of the unused weights, and do not compute them on pieces.
    count = len(whole) - 3  # with the embedding, the last norm and the head
    held = [whole[0], *[more] * count, *whole[-2:]]
    learns = [*held] if not used else [whole[0], *[block] * count, *whole[-2:]]
    key = learns[2]
    learns[2] = replace(
        key,
        weights=key.weights - KEY,
        cut_weights=key.cut_weights - KEY,
        tensors=key.tensors - 1,
        cut_tensors=key.cut_tensors - 1,
    )
    if tied:  # the head has the weights of the embedding
        held[-1] = learns[-1] = replace(held[-1], weights=0, cut_weights=0, tensors=0, units=0)
        held[-1] = learns[-1] = replace(held[-1], cut_tensors=0)
    else:
        learns[0] = replace(whole[0], weights=0, cut_weights=0, tensors=0, cut_tensors=0, units=0)
    return held, learns


def cnn_parts(config: Config, split: bool) -> list[Sized]:
    """Return the layers of the small cnn; those of its tensor plan are the last two."""
    model, rows = _built(config)
    found, x = [], rows.to(next(model.parameters()).device)
    for group in groups_of(model, rows, _world(), "flops"):
        for layer in group.layers.values():
            x = layer(x)
        weights = [weight for layer in group.layers.values() for weight in layer.parameters()]
        values = sum(weight.numel() for weight in weights)
        part = Sized(values, boundary=HALF * x.numel(), tensors=len(weights), cut_tensors=0)
        found.append(part)
    if split:  # columns with their bias; rows without it, a DTensor all the same
        values = found[-1].weights - 10
        found[-2] = replace(found[-2], cut_weights=found[-2].weights, cut_tensors=2)
        # The gradient of the input of columns is summed, and the output of rows.
        found[-3] = replace(found[-3], messages=1)
        found[-1] = replace(found[-1], cut_weights=values, cut_tensors=2, messages=1)
    return found


def own_parts(config: Config, tensor: int) -> list[Sized]:
    """Return the blocks of a model of the user's, and what is in none of them."""
    model, rows = _built(config)
    blocks = list(units(model))
    hidden, length = config.model.hidden_size, rows.shape[1]
    inside = {id(weight) for block in blocks for weight in block.parameters()}
    rest = [weight for weight in model.parameters() if id(weight) not in inside]
    found = [Sized(sum(weight.numel() for weight in rest), tensors=len(rest))]
    heads, width = config.model.num_heads, hidden // config.model.num_heads
    for block in blocks:
        weights = dict(block.named_parameters())
        cut = [name for name in weights if name.startswith(("up", "down"))]
        # The bias of rows is whole on every rank.
        values = sum(weights[name].numel() for name in cut if name != "down.bias")
        part = Sized(
            sum(weight.numel() for weight in weights.values()),
            values,
            attention=Attention(
                length, heads * tensor, width, heads * tensor
            ),  # its plan cuts none
            messages=2,
            boundary=HALF * hidden * length,
            tensors=len(weights),
            cut_tensors=len(cut),
        )
        found.append(part)
    return found


class Cell(NamedTuple):
    """A cell of the golden file: its configuration, and the parts of its model."""

    config: Config
    world_size: int
    layout: Layout
    parts: list[Sized]
    trained: list[Sized]


def cell(name: str) -> Cell:
    """Return a cell by its name in the golden file."""
    model, _, run = name.partition(": ")
    words, setups = RUNS[model]
    config = parse([*words, *setups[run].words])[1]
    layout = layout_of(config, setups[run].world_size)
    if model in ("text", "odd", "tied"):
        layers = f"model.num_layers={config.model.num_layers}"
        described = plan_model.describe(parse([*RUNS["text"][0], layers, *setups[run].words])[1])
        found = trained = gpt_parts(described)
        if model != "text":
            is_fsdp = layout.zero >= 2 or layout.tensor > 1 or layout.stages > 1
            found, trained = odd_parts(found, model == "tied", used=is_fsdp)
    elif model == "own":
        found = trained = own_parts(config, layout.tensor)
    else:
        inner = [word for word in words if not word.startswith("model.name=user_code")]
        plain = parse([*inner, *setups[run].words])[1]
        found = trained = cnn_parts(plain, layout.tensor > 1)
        if model == "sometimes":
            found.append(Sized(10 * 10 + 10, tensors=2))
    return Cell(config, setups[run].world_size, layout, found, trained)


def held(cell: Cell) -> list[list[range]]:
    """Return the pieces of the model on the ranks of each pipeline stage."""
    options, ranks = cell.config.parallel, cell.layout.stages
    if ranks == 1:
        return [[range(len(cell.parts))]]
    name = options.schedule_name
    owners = pipeline.owners(name, ranks, options.stages_per_rank if name in LOOPED else 1)
    costs = [group.cost for group in groups_of(*_built(cell.config), _world(), "flops")]
    bounds = balance(costs, len(owners))
    found: list[list[range]] = [[] for _ in range(ranks)]
    for stage, rank in enumerate(owners):
        own = found[rank]
        if own and own[-1].stop == bounds[stage]:  # neighbours on one rank send nothing
            own[-1] = range(own[-1].start, bounds[stage + 1])
        else:
            own.append(range(bounds[stage], bounds[stage + 1]))
    return found


def expected(name: str, cell: Cell, pieces: Sequence[range]) -> Messages:
    """Return what the closed forms say of the ranks with these pieces, as gloo sends it."""
    layout, found = cell.layout, Messages()
    is_ddp = layout.zero < 2 and layout.tensor == layout.stages == 1
    # The first pass of this step is dropped, since the step before met unused weights.
    repeats = 2 if name.startswith("sometimes") else 1
    for part in (
        planned.of_passes(cell.parts, pieces, layout, cell.trained),
        planned.of_update(cell.trained, pieces, layout),
    ):
        for (kind, ranks, apart), (count, size) in part.items():
            if kind in ("send", "receive"):
                found.add(kind, 2, 1, count, size)
            else:
                summed = "all-reduce" if kind == "reduce-scatter" else kind
                found.add(summed, ranks, apart, repeats * count, repeats * size)
    if is_ddp and name.startswith(("tied", "sometimes")):  # DDP says which weights it used
        tensors = sum(part.tensors for part in cell.trained)
        found.add("all-reduce", cell.world_size, 1, 1, 4 * tensors)
    return found


@pytest.mark.parametrize("name", golden())
def test_a_cell_sends_what_the_closed_forms_say(name: str) -> None:
    """Number and bytes of the messages of each group, on every rank."""
    one = cell(name)
    layout, pieces = one.layout, held(one)
    pads = layout.zero >= 2 or layout.tensor > 1 or layout.stages > 1
    is_cut = "bucket_mb" in str(RUNS[name.partition(":")[0]][1][name.partition(": ")[2]].words)
    apart = layout.ranks // layout.stages
    for rank in golden()[name]:
        found = expected(name, one, pieces[rank.number // apart])
        assert rank.sent.keys() == found.keys(), rank
        for group, (count, size) in rank.sent.items():
            said = found[group]
            assert count == said.messages or (is_cut and count > said.messages), (
                rank.number,
                group,
            )
            assert abs(size - said.size) <= PADDING * said.size * pads, (rank.number, group, said)
        assert rank.peers <= {apart, (layout.stages - 1) * apart}, rank


def test_lines_are_unfolded() -> None:
    text = "2 × (a[2 ranks] 4 B float; 3 × (b; c))"
    assert list(lines(text)) == ["a[2 ranks] 4 B float", *["b", "c"] * 3] * 2


def test_ddp_broadcasts_the_buffers_that_a_checkpoint_holds() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Module())
    model[1].register_buffer("rotation", torch.zeros(4), persistent=False)
    assert replicate._constants(model) == {"1.rotation"}
