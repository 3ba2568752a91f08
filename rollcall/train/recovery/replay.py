"""`rollcall replay RUN STEP`: repeat a skipped step and show where it broke.

One process computes what the rank that saw the fault computed, from the same weights, samples and
random numbers.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcall.cli.parser import parser
from rollcall.config import Config, ConfigError
from rollcall.messages.refusal import refuse
from rollcall.train.checkpoint import layout, manifest
from rollcall.train.checkpoint.contents import Damaged
from rollcall.train.inference import trained

if TYPE_CHECKING:
    from rollcall.train.ranks.world import World

DESCRIPTION = """\
Repeats a skipped step in one process, as the rank that saw the fault computed it, and shows where
a number is first not finite. Keys such as device=cpu or precision=fp32 change the run's
configuration.
"""


def main(words: Sequence[str]) -> int:
    """Replay a step; return 0 if a number was not finite again, 1 if all numbers were."""
    asked = parser("replay", DESCRIPTION, "rollcall replay RUN STEP [key=value ...]")
    asked.add_argument("run", metavar="RUN", help="name or directory of a run")
    asked.add_argument("step", metavar="STEP", type=int, help="number of a directory faults/step-*")
    options, settings = asked.parse_with_keys(words)
    try:
        run_dir, config = trained.find(options.run, settings)
        run = run_dir.path
        directory = layout.path_of(run / "faults", options.step)
        facts = manifest.read_named(directory).facts if directory.exists() else {}
        if "fault" not in facts:
            found = sorted(layout.published(run / "faults"))
            steps = ", ".join(map(str, found)) or "none"
            raise ConfigError(f"{directory}: this step was not kept; kept steps: {steps}")
        return _replay(config, run, facts)
    except (ConfigError, Damaged) as error:
        return refuse(error)


def _replay(config: Config, run: Path, facts: dict[str, Any]) -> int:
    # torch is imported only now, so that a wrong command line is answered at once.
    from rollcall.train.ranks.world import World

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ROLLCALL_WORLD_SIZE"):
        os.environ.pop(name, None)
    parallel = type(config.parallel)(strategy="single")
    sets = config.data.model_copy(update={"micro_batch": facts["fault"]["micro_batch"]})
    update = {"parallel": parallel, "data": sets}
    world = World.join(config.device)
    try:
        return _repeat(config.model_copy(update=update), world, run, facts)
    finally:
        world.leave()


def _repeat(config: Config, world: "World", run: Path, facts: dict[str, Any]) -> int:
    from rollcall.train import models
    from rollcall.train.checkpoint.engine import Engine
    from rollcall.train.checkpoint.store import CheckpointStore
    from rollcall.train.data import sets
    from rollcall.train.data.order import Order, training_batches
    from rollcall.train.numerics import losses, precision
    from rollcall.train.numerics.randomness import set_seed
    from rollcall.train.parallel.strategy import Strategy
    from rollcall.train.recovery.nonfinite import NOWHERE, Witness
    from rollcall.train.weights import start

    fault = facts["fault"]
    step, size = fault["step"], fault["micro_batch"]
    precision.prepare(config.precision, world.device)
    objective = losses.Objective(losses.of(config))
    source = sets.load(config.data, world, config.seed).learned_by(objective.loss)
    order = Order.of_run(config, source)
    order.continue_from(step - 1, facts)
    rows = range(*fault["rows"])
    begin = start.built(config, models.maker(config, source, world.device), draws=False)
    strategy = Strategy(config, world, objective)
    batch = next(training_batches(source, order, rows, range(step - 1, step)))
    strategy.place(begin.model, batch, begin.fill)
    state = {"model": dict(begin.model.state_dict())}
    Engine(CheckpointStore(run / "faults", world)).load(step, state)
    set_seed(config.seed, "step", fault["stream"], step - 1)
    objective.loss.turn = objective.loss.turn_of(step)
    parts = [part.to(world.device) for part in batch.split(size)]
    with Witness(strategy.model, objective) as witness:
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
