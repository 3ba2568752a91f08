"""The host memory that a rank needs to start, save and resume.

`PYTHONPATH=. python tests/campaigns/host_memory.py` prints a table.

Several ranks on this machine build a model, save it, and load it again; nothing is trained. Each
row is the largest peak of a rank, above what it needed before the model; of the export, above what
it needed before the export.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict

from rollcall.config import parse
from rollcall.messages.text import size
from rollcall.tools.bench import turns
from rollcall.train import models
from rollcall.train.checkpoint import layout
from rollcall.train.checkpoint.engine import Engine
from rollcall.train.checkpoint.store import CheckpointStore
from rollcall.train.checkpoint.tools.export import export
from rollcall.train.data import sets
from rollcall.train.data.order import Order, training_batches
from rollcall.train.numerics import losses
from rollcall.train.numerics.optim import OPTIONS
from rollcall.train.parallel.shard import units
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.device import local_of
from rollcall.train.ranks.world import World
from rollcall.train.weights import start

MODEL = ["gpt", "model.hidden_size=2048", "model.num_layers=20", "model.num_heads=16"]
MODEL += ["model.num_kv_heads=16", "data.global_batch=64", "data.seq_len=16"]


def main(argv: Sequence[str]) -> int:
    """Measure and print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc-per-node", type=int, default=8, metavar="K", help="ranks")
    parser.add_argument("words", nargs="*", help=f"recipe and keys (default: {' '.join(MODEL)})")
    options = parser.parse_intermixed_args(argv)
    words = options.words or [*MODEL, "parallel.strategy=zero3"]
    if "RANK" in os.environ:
        _rank(words, Path(os.environ["BENCH_RESULT"]))
        return 0
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        # Not forked: a fork maps the pages of libraries only when it uses them.
        os.environ |= {"BENCH_RESULT": name, "OMP_NUM_THREADS": "1"}
        program = __file__, *words
        turns.timed(turns.torchrun(*program, ranks=options.nproc_per_node))
        found = [json.loads(file.read_text()) for file in Path(name).glob("rank-*.json")]
    rows = [("on a rank, at most", "bytes")]
    for name in found[0]:
        rows.append((name, size(max(figures[name] for figures in found))))
    turns.show("host memory", rows)
    return 0


def _rank(words: list[str], folder: Path) -> None:
    world = World.join("cpu")
    config = parse(words)[1]
    source = sets.load(config.data, world)
    strategy = Strategy(config, world, losses.Objective(losses.of(config)))
    order = Order(source.train_size, 2, 2, config.seed)
    example = next(training_batches(source, order, range(2), range(1)))
    before = _resident("VmRSS")
    peaks: dict[str, int] = {}

    def measure(name: str, work: Callable[[], object]) -> None:
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        work()
        peaks[name] = _resident("VmHWM") - before

    def build() -> None:
        begin = start.built(config, lambda: models.build(config.model, source))
        counts = [sum(weight.nbytes for weight in unit.parameters()) for unit in units(begin.model)]
        rest = [weight.nbytes for weight in begin.model.parameters()]
        peaks["weights of the model"] = sum(rest)
        peaks["largest block or tensor"] = max([*counts, *rest])
        strategy.place(begin.model, example, begin.fill)
        peaks["weights of the rank"] = sum(
            local_of(weight).nbytes for weight in strategy.model.parameters()
        )

    def state() -> dict[str, object]:
        return {"model": state_dict.get_model_state_dict(strategy.model, options=OPTIONS)}

    def save() -> None:
        engine.begin(1, state())
        engine.wait(600)

    measure("peak while building", build)
    engine = Engine(CheckpointStore(folder / "checkpoints", world))
    measure("peak while saving", save)
    measure("peak while loading", lambda: engine.load(1, state()))
    before = _resident("VmRSS")
    if world.is_main:
        saved = layout.published(folder / "checkpoints")[1]
        measure(
            "peak while exporting",
            lambda: export(saved, folder / "x.safetensors", "safetensors"),
        )
    else:
        measure("peak while exporting", lambda: None)
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(peaks))
    world.leave()


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
