"""What the ranks send in a training step, as torch's flight recorder saw it, beside a golden file.

Write the golden file anew with `ROLLCALL_GOLDEN=write`, and read what changed.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkout import ROOT

from rollcall.train.step import Gradient, Updater

GOLDEN = ROOT / "tests" / "golden" / "traffic.txt"
COUNT = re.compile(r"all_reduce\[[\d,]+\] 8 B double")
"""The number of targets that count, which the sample and not the strategy decides to send."""
ROUTED = re.compile(r"(all_to_all\[[\d,]+\]) [\d,]+ B float")
STEP = 2
"""The step that is recorded, since DDP makes its buckets anew in the first one."""
BYTES = {
    "Float": 4,
    "Double": 8,
    "Long": 8,
    "Int": 4,
    "BFloat16": 2,
    "Half": 2,
    "Byte": 1,
    "Bool": 1,
}


def record(roots: list[Path]) -> None:
    """Let each rank write what it sends in one step of each run, without what members exchange."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    pending = iter(roots)
    compute, apply, make = Gradient.compute, Updater.apply, dist.P2POp.__init__
    state: dict[str, Any] = {"own": None, "root": None, "lines": [], "on": False}
    passed: list[tuple[int, str]] = []  # what the recorder does not see, and what came before

    def begin(gradient: Gradient, batch: Any, number: int) -> None:
        if state["own"] is not gradient:
            state.update(own=gradient, root=next(pending), lines=[])
        with _watched(number):
            compute(gradient, batch, number)

    def end(updater: Updater, gradient: Gradient, number: int) -> Any:
        with _watched(number):
            numbers = apply(updater, gradient, number)
        if number == STEP:
            file = state["root"] / f"traffic-{dist.get_rank()}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(state["lines"]))
        return numbers

    @contextmanager
    def _watched(step: int) -> Iterator[None]:
        if step != STEP:
            yield
            return
        before = _newest()
        passed.clear()
        state["on"] = True
        yield
        state["on"] = False
        both = [*_since(before), *((at + 0.5, line) for at, line in passed)]
        lines = [line for _, line in sorted(both, key=itemgetter(0))]
        state["lines"] += [line for line in lines if not COUNT.fullmatch(line)]

    def make_and_note(
        one: dist.P2POp,
        op: Any,
        tensor: torch.Tensor,
        peer: int | None = None,
        *rest: Any,
        **more: Any,
    ) -> None:
        make(one, op, tensor, peer, *rest, **more)
        if state["on"]:
            what = f"send to {one.peer}" if op is dist.isend else f"receive from {one.peer}"
            kind = str(tensor.dtype).removeprefix("torch.float32") or "float"
            passed.append((_newest(), f"{what} {tensor.nbytes:,} B {kind}"))

    setattr(Gradient, "compute", begin)  # noqa: B010
    setattr(Updater, "apply", end)  # noqa: B010
    setattr(dist.P2POp, "__init__", make_and_note)  # noqa: B010


def read(root: Path, world_size: int, is_routed: bool) -> dict[str, list[str]]:
    """Return the lines of each rank; ranks with the same lines together.

    How many tokens travel to experts follows from numbers that another processor rounds otherwise.
    """
    found: dict[tuple[str, ...], list[int]] = {}
    for rank in range(world_size):
        lines = json.loads((root / f"traffic-{rank}.json").read_text())
        if is_routed:
            lines = [ROUTED.sub(r"\1 of the tokens", line) for line in lines]
        found.setdefault(tuple(_relative(line, rank) for line in lines), []).append(rank)
    return {
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}": folded(list(lines))
        for lines, ranks in found.items()
    }


def _relative(line: str, rank: int) -> str:
    """Write groups as the number of ranks and the distance between two, peers as a distance."""

    def group(match: re.Match[str]) -> str:
        ranks = [int(word) for word in match[1].split(",")]
        [step] = {b - a for a, b in itertools.pairwise(ranks)} or {1}
        assert rank in ranks
        return f"[{len(ranks)} ranks, every {step}]" if step > 1 else f"[{len(ranks)} ranks]"

    def peer(match: re.Match[str]) -> str:
        return f"{match[1]} rank{int(match[2]) - rank:+d}"

    return re.sub(r"\b(to|from) (\d+)", peer, re.sub(r"\[([\d,]+)\]", group, line))


def folded(lines: list[str]) -> list[str]:
    """Write what comes several times in a row once, with a count: lines, and groups of lines."""
    for size in range(1, 13):
        at, done = 0, []
        while at < len(lines):
            group, count = lines[at : at + size], 1
            while lines[at + count * size : at + (count + 1) * size] == group:
                count += 1
            if count > 1 and len(group) == size:
                text = "; ".join(group)
                done.append(f"{count} × {text}" if size == 1 else f"{count} × ({text})")
                at += count * size
            else:
                done.append(lines[at])
                at += 1
        lines = done
    return lines


def compare(found: dict[str, dict[str, list[str]]]) -> None:
    """Compare with the golden file, or write these sections of it."""
    golden = sections(GOLDEN.read_text())
    made = {
        name: [name, *(text for who, lines in ranks.items() for text in _listed(who, lines))]
        for name, ranks in found.items()
    }
    if os.environ.get("ROLLCALL_GOLDEN") == "write":
        golden |= made
        GOLDEN.write_text("".join(f"{line}\n" for lines in golden.values() for line in lines))
    for name, lines in made.items():
        changes = difflib.unified_diff(golden.get(name, []), lines, lineterm="", n=8)
        assert lines == golden.get(name), "\n".join(changes)


def _listed(who: str, lines: list[str]) -> list[str]:
    return [f"  {who}", *(f"    {line}" for line in lines)]


def sections(text: str) -> dict[str, list[str]]:
    """Return the lines of each cell, by its name."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if not line.startswith(" "):
            name = line
        found.setdefault(name, []).append(line)
    return found


def _entries() -> list[dict[str, Any]]:
    c10d: Any = torch._C._distributed_c10d  # the stubs of some versions of torch lack the function
    dump = json.loads(c10d._dump_fr_trace_json(True, False))
    found: list[dict[str, Any]] = dump.get("entries", [])
    return found


def _newest() -> int:
    return max((entry["record_id"] for entry in _entries()), default=-1)


def _since(record_id: int) -> Iterator[tuple[int, str]]:
    names = {group.group_name: dist.get_process_group_ranks(group) for group in _groups()}
    for entry in _entries():
        if entry["record_id"] > record_id:
            kind = entry["profiling_name"].removeprefix("gloo:")
            sizes, types = entry["input_sizes"], entry["input_dtypes"]
            if not sizes:
                sizes, types = entry["output_sizes"], entry["output_dtypes"]
            count = sum(math.prod(size) * BYTES[of] for size, of in zip(sizes, types, strict=True))
            ranks = ",".join(map(str, names[entry["process_group"][0]]))
            what = f"{kind}[{ranks}] {count:,} B {'+'.join(dict.fromkeys(types)).lower()}"
            yield entry["record_id"], what


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)
