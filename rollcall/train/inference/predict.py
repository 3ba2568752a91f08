"""`rollcall predict RUN [key=value …]`: write a trained model's outputs for files or a data set.

The ranks share the samples, with any strategy: torchrun --nproc_per_node=4 -m rollcall.train
predict RUN … starts four. key=value overrides the run's configuration.

The samples are divided into parts of a fixed size. Each rank computes some of the parts and writes
each atomically, so after a stop or a kill the same command continues with the missing parts, on any
number of ranks. At the end rank 0 concatenates them.
"""

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcall.cli.parser import parser as command_parser
from rollcall.config import Config, ConfigError
from rollcall.messages.refusal import refuse, refusing
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_object, sync, write_atomic
from rollcall.system.process import outlast_full_disks
from rollcall.train.data import files
from rollcall.train.inference import trained
from rollcall.train.main import on_all_ranks

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from rollcall.train.inference.outputs import Lines
    from rollcall.train.inference.trained import Trained
    from rollcall.train.ranks.signals import StopSignals
    from rollcall.train.ranks.world import World

MAX_PART = 1024
"""The largest number of samples of a part."""
PARTS_OF_A_RANK = 4
"""The smallest number of parts per rank; fewer would leave ranks idle, or lose more to a kill."""


class Parts:
    """The parts of one output file, in a directory next to it until all are complete."""

    def __init__(self, output: Path, world: "World") -> None:
        self._output, self.world = output, world
        self._directory = output.with_name(f"{output.name}.parts")
        self.samples, self.size = 0, 1  # of all parts, and of one

    def begin(self, facts: dict[str, Any], samples: int, size: int) -> None:
        """Begin, or continue with existing parts and their size; all parts have the same facts."""
        with self.world.together(), refusing(f"{self._directory}: cannot write"):
            if self.world.is_main:
                size = self._begin({**facts, "samples": samples}, size)
        self.samples = samples
        self.size = int(self.world.broadcast(size))

    def indices(self, part: int) -> range:
        """Return the indices of the samples of a part."""
        return range(part * self.size, min((part + 1) * self.size, self.samples))

    def missing(self) -> list[int]:
        """Return the missing parts, the same on every rank."""
        numbers = range(-(-self.samples // self.size)) if self.world.is_main else ()
        missing = [number for number in numbers if not self.path(number).exists()]
        return list(self.world.broadcast(missing))

    def path(self, part: int) -> Path:
        """Return the file of a part."""
        return self._directory / f"{part:08d}.jsonl"

    def join(self) -> None:
        """Make one file of all parts; call it on one rank."""
        whole = self._directory / "whole.jsonl"
        parts = range(-(-self.samples // self.size))
        with whole.open("wb") as file:
            file.writelines(self.path(part).read_bytes() for part in parts)
        sync(whole)
        whole.replace(self._output)
        sync(self._output.parent)
        shutil.rmtree(self._directory)

    def _begin(self, facts: dict[str, Any], size: int) -> int:
        plan = self._directory / "plan.json"
        if not plan.exists():
            if self._output.exists():
                text = f"--output {self._output} exists; delete it, or choose another file"
                raise ConfigError(text)
            self._directory.mkdir(parents=True, exist_ok=True)
            write_atomic(plan, json.dumps({"size": size, **facts}) + "\n")
        before = read_object(plan) or {}
        if changed := [name for name in facts if facts[name] != before.get(name)]:
            raise ConfigError(
                f"{self._directory} contains parts of another prediction ({', '.join(changed)} "
                "differ); delete it, or choose another --output"
            )
        for path in self._directory.glob(".*"):  # left by killed writers
            path.unlink()
        return int(before.get("size", size))


def main(words: Sequence[str]) -> int:
    """Write the predictions to a file; return the exit code."""
    parser = command_parser("predict", __doc__)
    add, samples = parser.add_argument, parser.add_mutually_exclusive_group()
    add("run", metavar="RUN", help="name or directory of a run")
    kinds = "images or texts: comma-separated files, directories or quoted patterns"
    samples.add_argument("--input", metavar="FILES", help=kinds)
    split, splits = "part of the run's data set (default: %(default)s)", ("train", "validation")
    samples.add_argument("--split", choices=splits, default="validation", help=split)
    output = "a .jsonl file, with a line for each sample (default: predictions.jsonl of the run)"
    add("--output", type=Path, metavar="FILE", help=output)
    batch = "samples per forward pass on one rank (default: data.micro_batch of the run, or 64)"
    add("--batch", type=int, help=batch)
    add("--best", action="store_true", help=trained.BEST)
    options, overrides = parser.parse_with_keys(words)
    try:
        run_dir, config = trained.find(options.run, overrides)
        options.output = (options.output or run_dir.path / "predictions.jsonl").absolute()
        if options.output.suffix != ".jsonl":
            raise ConfigError(f"--output: expected a file that ends in .jsonl: {options.output}")
        if options.batch is None:
            size = config.data.micro_batch
            options.batch = size if isinstance(size, int) else 64
        if options.batch < 1:
            raise ConfigError(f"--batch: expected at least 1, got {options.batch}")
        options.files = files.find(options.input, "--input") if options.input is not None else []
    except ConfigError as error:
        return refuse(error)
    outlast_full_disks()  # and a closed terminal: the outputs go to a file
    return on_all_ranks(config.device, partial(_predict, run_dir, config, options))


def _predict(
    run_dir: RunDir,
    config: Config,
    options: argparse.Namespace,
    world: "World",
    stop: "StopSignals",
) -> int:
    from rollcall.train.inference.outputs import Lines

    with trained.load(run_dir, config, world, options.input is None, options.best) as model:
        dataset, facts = _samples(model, options)
        parts = Parts(options.output, world)
        samples = len(dataset)
        if not samples:
            raise ConfigError(f"{options.input or options.split}: no samples to predict")
        options.batch = min(options.batch, samples)
        facts = {**facts, "run": str(run_dir.path), "step": model.step}
        parts.begin(facts, samples, _size(samples, model.strategy.data_ranks, options.batch))
        output = Lines(model, dataset, options.input is None)
        missing = parts.missing()
        started = time.perf_counter()
        _compute(model, dataset, parts, output, options.batch, stop)
        seconds = time.perf_counter() - started
        left = parts.missing()
    if world.is_main:
        if not left:
            with refusing(f"{options.output}: cannot write"):
                parts.join()
        count = sum(len(parts.indices(part)) for part in missing if part not in left)
        end = "stopped; the same command continues" if left else str(options.output)
        print(
            f"rollcall: predicted {count:,} of {samples:,} samples in {seconds:.1f} s, "
            f"{count / seconds:,.0f} samples/s; {end}",
            flush=True,
        )
    return os.EX_TEMPFAIL if left else 0


def _samples(model: "Trained", options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Return the samples, and facts that identify them for a continued prediction."""
    from rollcall.train.data.packing import Packed
    from rollcall.train.data.stream import Stream

    source = model.source
    if options.input is None:
        dataset: Any = source.train if options.split == "train" else source.validation
        rows = dataset.rows if isinstance(dataset, Packed) else dataset
        if isinstance(rows, Stream):
            raise ConfigError(f"--split {options.split} is a stream without numbers; use --input")
        return rows, {"input": options.split}
    if source.read is None:
        raise ConfigError(
            f"--input: data.name={model.config.data.name} cannot read files; use --split, or set "
            "the `read` function of its Source"
        )
    return source.read(options.files), {"input": [str(path.absolute()) for path in options.files]}


def _size(samples: int, ranks: int, batch: int) -> int:
    even = math.ceil(samples / (PARTS_OF_A_RANK * ranks))
    return math.ceil(min(even, MAX_PART) / batch) * batch


def _compute(
    model: "Trained",
    dataset: "Dataset[Any]",
    parts: Parts,
    output: "Lines",
    batch: int,
    stop: "StopSignals",
) -> None:
    import torch

    from rollcall.train.data.form import HIDDEN
    from rollcall.train.data.loading import Loading
    from rollcall.train.data.reader import Selection

    strategy, config = model.strategy, model.config
    missing, world = parts.missing(), parts.world
    # All ranks take the same number of turns, because strategies communicate.
    turns = math.ceil(len(missing) / strategy.data_ranks)
    passes = math.ceil(parts.size / batch)

    def part(turn: int) -> int | None:
        number = turn * strategy.data_ranks + strategy.data_rank
        return missing[number] if number < len(missing) else None

    def indices(number: int) -> range:
        turn, batch_number = divmod(number, passes)
        samples = range(0) if (mine := part(turn)) is None else parts.indices(mine)
        return samples[batch_number * batch : (batch_number + 1) * batch]

    def select(number: int) -> Selection:
        samples = [*indices(number)]
        padding = batch - len(samples)
        weights = torch.tensor([1.0] * len(samples) + [0.0] * padding)
        return Selection(samples + [0] * padding, [0] * batch, weights)

    loading = Loading(config.data, config.seed, world.rank, world.device)
    form = replace(model.source.form, packs=False, mask=model.source.form.mask or HIDDEN)
    batches = loading.batches(dataset, "the input", select, range(turns * passes), form)
    # Of the ranks that compute the same outputs, the first writes them.
    shares = world.gather(torch.tensor([strategy.data_rank])).flatten().tolist()
    writes = shares.index(strategy.data_rank) == world.rank
    content: list[str] = []
    for number, samples in enumerate(batches):
        inputs, filled = form.measured(samples.inputs)
        samples = samples._replace(inputs=inputs).to(world.device)
        outputs = model.outputs(samples).cpu()
        content += output.encode(indices(number), outputs, samples.to(torch.device("cpu")), filled)
        turn, batch_number = divmod(number, passes)
        if batch_number < passes - 1:
            continue
        must_stop, unreadable = world.sum(stop.received is not None, loading.unreadable)
        loading.refuse(world, unreadable * strategy.data_ranks / world.world_size)
        mine = part(turn)
        subject = f"rank {world.rank}: cannot write part {mine}"
        with world.together(), refusing(subject, "; choose another --output"):
            if mine is not None and writes:
                write_atomic(parts.path(mine), "".join(content))
        content = []
        if must_stop:
            return
