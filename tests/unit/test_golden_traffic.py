"""What every cell of tests/golden/traffic.txt sends, against the planner's closed forms."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import traffic
from multi.test_strategies import RUNS

from rollcall.config import Config, parse
from rollcall.planning import traffic as planned
from rollcall.planning.layout import Layout
from rollcall.train import plan_model

PADDING = 5e-3
"""FSDP pads a weight that does not divide: of digits, ten classes on four ranks."""
NORMS = 512
"""Bytes for the norm of the gradient: a number for each tensor at most."""
WITHOUT = {
    r".*(pipeline|split|interleaved|gpipe|first|zero-bubble|zbv|dualpipev)": (
        "the form is for one stage; what stages send depends on where the model is cut"
    ),
    r"(digits|whole): .*tensor": "the form is for the layers of gpt, not for convolutions",
    r".*sequence": "the form is for whole messages; pieces of sequences are gathered and scattered",
    r".*-again": "the form is for a step that computes nothing twice",
    r"tied: ": "the form counts all weights; those that are frozen or unused are not sent",
    r"(own|sometimes): ": "the model does not run on the meta device, so the planner refuses it",
}
"""Cells that have no closed form, and why."""
LINE = re.compile(r"(\w+)\[(\d+) ranks(?:, every \d+)?\] ([\d,]+) B (\w+)")


def lines(text: str) -> Iterator[str]:
    """Yield the messages of a line of the golden file, with what is repeated as often as it is."""
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


def golden() -> dict[str, Counter[str]]:
    """Return the bytes that the first ranks of each cell hand over, by kind.

    An all-gather counts as what it returns. gloo has no reduce-scatter: FSDP uses an all-reduce.
    """
    found: dict[str, Counter[str]] = {}
    heads = 0
    for line in traffic.GOLDEN.read_text().splitlines():
        if not line.startswith(" "):
            found[line] = sent = Counter[str]()
            heads = 0
        elif not line.startswith("    "):
            heads += 1
        elif heads == 1:
            for one in lines(line):
                if match := LINE.fullmatch(one):
                    times = int(match[2]) if match[1] == "all_gather" else 1
                    sent[match[1]] += times * int(match[3].replace(",", ""))
                else:
                    sent["send or receive"] += 1
    return found


def layout_of(config: Config, ranks: int) -> Layout:
    """Return how a cell lies on its ranks, two on each node."""
    degrees = config.parallel.degrees(ranks, min(ranks, 2))
    shard, replicas = degrees.get("shard", 1), degrees.get("replicate", 1)
    share = -(-config.data.global_batch // (shard * replicas))
    given = config.data.micro_batch
    return Layout(
        data=shard * replicas,
        tensor=degrees.get("tensor", 1),
        context=degrees.get("context", 1),
        zero=config.parallel.stage if shard > 1 else 0,
        shard=shard if replicas > 1 and shard > 1 else 0,
        micro=min(given, share) if isinstance(given, int) else share,
        batch=share * shard * replicas,
        precision=config.precision,
    )


def test_every_cell_sends_what_the_closed_forms_say() -> None:
    """Bytes by kind of all cells of the golden file, but those that have no form."""
    compared = 0
    for name, sent in golden().items():
        if any(re.match(pattern, name) for pattern in WITHOUT):
            continue
        model, _, cell = name.partition(": ")
        words, setups = RUNS[model]
        config = parse([*words, *setups[cell].words])[1]
        described, layout = plan_model.describe(config), layout_of(config, setups[cell].world_size)
        terms = planned.of_step(described, layout)
        expected = {
            "all_reduce": terms.get("all-reduce", 0.0) + terms.get("reduce-scatter", 0.0),
            "all_gather": terms.get("all-gather", 0.0),
            "all_to_all": terms.get("all-to-all", 0.0),
            "broadcast": 4.0 * described.weights * (layout.zero == 1),  # shards of new weights
        }
        for kind, size in expected.items():
            apart = abs(sent.pop(kind, 0) - size)
            assert apart <= PADDING * size + NORMS, (name, kind, apart, size)
        assert not sent, (name, sent)
        compared += 1
    assert compared >= 20, compared


def test_every_reason_belongs_to_a_cell() -> None:
    for pattern in WITHOUT:
        assert any(re.match(pattern, name) for name in golden()), pattern


def test_lines_are_unfolded() -> None:
    text = "2 × (a[2 ranks] 4 B float; 3 × (b; c))"
    assert list(lines(text)) == ["a[2 ranks] 4 B float", *["b", "c"] * 3] * 2
