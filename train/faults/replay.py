"""`python -m train replay RUN STEP`: repeat a step that changed nothing, and see where it broke.

One process computes what the rank that saw the fault computed: the same weights, samples and
random numbers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train import config as schema
from train.checkpoint import manifest, shelf
from train.config import Config, ConfigError
from train.run import named

if TYPE_CHECKING:
    from train.world import World

USAGE = """\
Usage: python -m train replay RUN STEP [key=value ...]

Repeats a step that changed nothing, as the rank that saw the fault computed it, in one process,
and says where a number is first not finite. RUN is the directory of a run, or its name in runs/.
Its faults lie in faults/step-*; STEP is such a number. Keys change the run's configuration, such
as device=cpu or precision=fp32.
"""


def main(words: Sequence[str]) -> int:
    """Replay a step; return the exit code: 0 if a number was not finite again, 1 if all were."""
    if len(words) < 2 or "--help" in words or "-h" in words:
        print(USAGE, end="")
        return 0 if "--help" in words or "-h" in words else 2
    try:
        run, step = _run(words[0]), _step(words[1])
        directory = shelf.place(run / "faults", step)
        fault = manifest.read(directory).facts["fault"] if directory.exists() else None
        if fault is None:
            found = sorted(shelf.published(run / "faults"))
            known = f"there are {', '.join(map(str, found))}" if found else "there are none"
            raise ConfigError(f"{directory}: no weights of this step were kept; {known}")
        _, config = schema.parse([str(run / "config.yaml"), *words[2:]])
        return _replay(config, run, fault)
    except (ConfigError, manifest.Damaged) as error:
        print(f"rollcall: error: {error}", file=sys.stderr)
        return 2


def _run(name: str) -> Path:
    path = named(name, "config.yaml")
    if path is None:
        raise ConfigError(f"{name} is neither the directory of a run nor a name in runs/")
    return path


def _step(text: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"{text} is not the number of a step")
    return int(text)


def _replay(config: Config, run: Path, fault: dict[str, Any]) -> int:
    # Only now torch: a mistake in the words is answered before it is imported.
    from train.world import World

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ROLLCALL_WORLD_SIZE"):
        os.environ.pop(name, None)
    world = World.join(config.device)
    try:
        return _again(_alone(config, fault), world, run, fault)
    finally:
        world.leave()


def _alone(config: Config, fault: dict[str, Any]) -> Config:
    """The configuration of one process that computes what the rank computed."""
    parallel = type(config.parallel)(strategy="single")
    data = config.data.model_copy(update={"micro_batch": fault["micro_batch"]})
    return config.model_copy(update={"parallel": parallel, "data": data, "exact": False})


def _again(config: Config, world: World, run: Path, fault: dict[str, Any]) -> int:
    from train import data, losses, models, precision
    from train import parallel as strategies
    from train.checkpoint import Checkpointer
    from train.data.order import Order, training_batches
    from train.faults.witness import NOWHERE, Witness
    from train.randomness import set_seed

    step, batch_size = fault["step"], config.data.global_batch
    precision.prepare(config.precision, world.device)
    objective = losses.Objective(losses.build(config.train.loss))
    source = data.load(config.data, world)
    order = Order(source.train_size, step * batch_size, batch_size, config.seed)
    rows = range(*fault["rows"])
    model = models.adapt(models.build(config.model, source), config, world.device)
    strategy = strategies.build(config, world, objective)
    batch = next(training_batches(source, order, rows, range(step - 1, step)))
    strategy.place(model, batch)
    state = {"model": dict(model.state_dict())}
    Checkpointer(run / "faults", world).load(step, state)
    set_seed(config.seed, "step", fault["stream"], step - 1)
    size = fault["micro_batch"]
    parts = [
        type(batch)(*(tensor[at : at + size].to(world.device) for tensor in batch))
        for at in range(0, len(rows), size)
    ]
    witness = Witness(strategy.model, objective)
    with witness:
        strategy.forward_backward(parts, order.count(step - 1))
    finding = witness.finding()
    samples, _ = order.samples(step - 1, rows)
    print(f"step {step} of {run}, as rank {fault['rank']} of {fault['world_size']} computed it:")
    print(f"  then    {fault['kind']}, first in {fault['place']}")
    print(f"  now     {'all numbers are finite' if finding.stage == NOWHERE else finding.place}")
    _, worst = witness.largest(8)
    for row in finding.rows or worst:
        print(f"  sample  {samples[row]}: loss {witness.losses[row].item():.6g}")
    return int(finding.stage == NOWHERE)
