"""`python -m train predict RUN`: the outputs of a trained model for files or a data set, in order.

The samples are cut into parts of a fixed size. Each rank computes its own parts, and each part is
written whole: what was killed goes on with the parts that are missing, on any number of ranks. At
the end rank 0 joins them to one file.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.config import Config, ConfigError
from train.inference import trained
from train.inference.parts import Parts
from train.run import RunDir

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from train.inference.outputs import Format
    from train.inference.trained import Trained
    from train.stop import StopSignals
    from train.world import World

USAGE = """\
python -m train predict RUN [--input FILES | --split NAME] [--output FILE] [key=value ...]
       torchrun --nproc_per_node=4 -m train predict RUN parallel.strategy=zero3

The ranks share the samples, with any strategy; key=value changes the run's configuration. The same
command goes on after a stop or a kill.
"""
SUFFIXES = (".jsonl", ".npy")
PART = 1024
"""Samples of a part, at most."""
PARTS_OF_A_RANK = 4
"""At least; fewer would leave ranks without work, or lose more of it to a kill."""


def main(words: Sequence[str]) -> int:
    """Write the predictions to a file; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m train predict", usage=USAGE)
    parser.add_argument("run", metavar="RUN", help="name or directory of a run")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--input",
        metavar="FILES",
        help="images or texts: files, directories or quoted patterns, with commas between them",
    )
    what.add_argument(
        "--split", choices=("train", "validation"), default="validation", help="(%(default)s)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="a line for each sample (.jsonl) or the outputs as an array (.npy) "
        "(default: predictions.jsonl in the run's directory)",
    )
    parser.add_argument(
        "--batch", type=int, default=64, help="samples of a forward pass on a rank (%(default)s)"
    )
    options, overrides = parser.parse_known_args(words)
    try:
        run_dir, config = trained.find(options.run, overrides)
        options.output = (options.output or run_dir.path / "predictions.jsonl").absolute()
        if options.output.suffix not in SUFFIXES:
            raise ConfigError(
                f"--output {options.output}: expected a name with {' or '.join(SUFFIXES)}"
            )
        if options.batch < 1:
            raise ConfigError(f"--batch {options.batch}: expected at least 1")
    except ConfigError as error:
        return trained.refuse(error)
    return trained.on_all_ranks(config, partial(_predict, run_dir, config, options))


def _predict(
    run_dir: RunDir, config: Config, options: argparse.Namespace, world: World, stop: StopSignals
) -> bool:
    from train.inference.outputs import FORMATS

    with trained.load(run_dir, config, world, options.input is None) as model:
        dataset, facts = _samples(model, options)
        parts = Parts(options.output, world)
        samples = len(dataset)
        facts = {**facts, "run": str(run_dir.path), "step": model.step}
        parts.begin(facts, samples, _size(samples, model.strategy.data_ranks, options.batch))
        output = FORMATS[options.output.suffix](model, dataset, options.input is None)
        before = parts.missing()
        started = time.perf_counter()
        _compute(model, dataset, parts, output, options.batch, stop)
        seconds = time.perf_counter() - started
        left = parts.missing()
    if world.is_main:
        count = sum(len(parts.rows(part)) for part in before if part not in left)
        speed = (
            f"{count:,} of {samples:,} samples in {seconds:.1f} s, {count / seconds:,.0f} samples/s"
        )
        if not left:
            try:
                parts.join(output.join)
            except OSError as error:
                raise ConfigError(f"{options.output} cannot be written: {error.strerror}") from None
        end = "stopped; the same command goes on" if left else str(options.output)
        print(f"rollcall: predicted {speed}; {end}", flush=True)
    return not left


def _samples(model: Trained, options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """What to predict, and the facts by which another start knows that it is the same."""
    from train.data import files

    source = model.source
    if options.input is None:
        dataset = source.train if options.split == "train" else source.validation
        return dataset, {"input": options.split}
    if source.read is None:
        raise ConfigError(
            f"data.name={model.config.data.name} does not say how to read files: use --split, or "
            "give its Source a function `read`"
        )
    paths = files.find(options.input, "--input")
    return source.read(paths), {"input": [str(path.absolute()) for path in paths]}


def _size(samples: int, ranks: int, batch: int) -> int:
    """Samples of a part: whole batches, some parts for each rank."""
    even = math.ceil(samples / (PARTS_OF_A_RANK * ranks))
    return math.ceil(min(even, PART) / batch) * batch


def _compute(
    model: Trained,
    dataset: Dataset[Any],
    parts: Parts,
    output: Format,
    batch: int,
    stop: StopSignals,
) -> None:
    """Compute the missing parts, or as many as there is time for."""
    import torch

    from train.data.loading import Loading
    from train.data.reading import Pick
    from train.data.source import Batch

    strategy, config = model.strategy, model.config
    missing, world = parts.missing(), parts.world
    turns = math.ceil(len(missing) / strategy.data_ranks)  # as many for every rank: it may send
    passes = math.ceil(parts.size / batch)

    def part(turn: int) -> int | None:
        place = turn * strategy.data_ranks + strategy.data_rank
        return missing[place] if place < len(missing) else None

    def rows(number: int) -> range:
        turn, place = divmod(number, passes)
        mine = part(turn)
        return range(0) if mine is None else parts.rows(mine)[place * batch : (place + 1) * batch]

    def pick(number: int) -> Pick:
        samples, padding = [*rows(number)], batch - len(rows(number))
        weights = torch.tensor([1.0] * len(samples) + [0.0] * padding)
        return Pick(samples + [0] * padding, [0] * batch, weights)

    loading = Loading(config.data, config.seed, world.rank, world.device)
    batches = loading.batches(dataset, "the input", pick, range(turns * passes))
    writes = _is_first_of_share(strategy.data_rank, world)
    content: list[Any] = []
    for number, read in enumerate(batches):
        outputs = strategy.forward(read.to(world.device)).cpu()
        content += output.encode(rows(number), outputs, Batch(*(part.cpu() for part in read)))
        turn, place = divmod(number, passes)
        if place < passes - 1:
            continue
        asked, unreadable = trained.add(stop.received is not None, loading.unreadable)
        loading.refuse(world, unreadable * strategy.data_ranks / world.world_size)
        mine, problem = part(turn), ""
        if mine is not None and writes:
            try:
                output.write(parts.path(mine), content)
            except OSError as error:
                problem = f"rank {world.rank}: {parts.path(mine)}: {error.strerror}"
        world.raise_together(problem)
        content = []
        if asked:
            return


def _is_first_of_share(share: int, world: World) -> bool:
    """Whether this rank writes what all ranks with its share compute alike."""
    import torch
    import torch.distributed as dist

    shares = [torch.zeros(1, dtype=torch.int64) for _ in range(world.world_size)]
    dist.all_gather(shares, torch.tensor([share]))
    return [int(other) for other in shares].index(share) == world.rank
