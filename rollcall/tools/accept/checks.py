"""`python -m rollcall.tools.accept.checks FOLDER COMMAND …`: the checks of `rollcall accept`.

All ranks run it. A check calls what another command calls, and says in a line what it found. An
exception ends the ranks; their launcher starts them again, and the next attempt continues behind
that check. The page is written after each check.
"""

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollcall.config import ConfigError, parse
from rollcall.launch.doctor import nodes
from rollcall.launch.doctor.check import THOROUGH, Result
from rollcall.launch.doctor.checkup import MUST_MATCH, compare
from rollcall.launch.runs import find, root_cause
from rollcall.launch.runs.states import Condition
from rollcall.messages.refusal import RefusedError, refuse
from rollcall.messages.text import duration, listed, size
from rollcall.records.run_dir import RunDir
from rollcall.system.process import leave
from rollcall.tools.accept import page, request
from rollcall.tools.accept.page import Facts, Row
from rollcall.tools.accept.request import STRATEGIES, Request
from rollcall.tools.bench import loops, rank_jobs, turns
from rollcall.tools.bench.rank_jobs import Job
from rollcall.tools.plan import memory
from rollcall.tools.plan import own_model as plan_model
from rollcall.tools.plan.layout import Layout
from rollcall.tools.plan.machine import Machines
from rollcall.train import models, network
from rollcall.train.checkpoint.tools import export
from rollcall.train.data import sets
from rollcall.train.data.order import validation_batches
from rollcall.train.exact import difference
from rollcall.train.main import on_all_ranks
from rollcall.train.numerics import losses, optim
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.agreement import Step
from rollcall.train.ranks.run import Run
from rollcall.train.ranks.signals import StopSignals
from rollcall.train.ranks.world import World
from rollcall.train.training import train

TOLERANCES = {"cpu": (rank_jobs.TOLERANCE, 1e-4), "cuda": (1e-3, 1e-2)}
"""Allowed relative differences of a loss, and of a weight by its norm. AdamW turns the last bits of
a gradient near zero into a part of a step. Those of GPUs have not been tried yet."""
RESUMED = {"cpu": (0.0, 0.0), "cuda": TOLERANCES["cuda"]}
"""The same after a resume, which changes nothing on CPUs."""
WIRE = {"nccl": 0.5, "gloo": 0.02}
"""Share of the wire that an all-reduce must reach; gloo copies on the CPU."""
SIZES = (2**16, 2**20, 2**24)
"""Bytes of the collectives."""
STATE = 0.03
"""Allowed relative difference of the memory of weights, gradients and optimizer from the plan."""
OVERHEAD = 2e-3
"""Seconds of CPU that a step may take beyond a loop of ten lines."""
STEPS, KILLED_AFTER = 24, 6
TEXT = (
    *("data.name=text", "data.seq_len=64", "model.name=gpt", "model.hidden_size=64"),
    *("model.num_layers=2", "optim.lr=1e-3", "train.steps=4", "data.micro_batch=4"),
)
ON_TEXT = ("context", "sequence", "zero3 and tensor")


class NotApplicable(Exception):
    """A check has no meaning here; the message says why."""


class Failed(Exception):
    """A check failed; the message says how."""


class Setup:
    """The ranks, the folder of this acceptance, and the keys of every run."""

    def __init__(self, world: World, signals: StopSignals, folder: Path, words: Sequence[str]):
        self.world, self.signals, self.folder = world, signals, folder
        self._words = [*words, f"device={world.device.type}"]
        local = world.gather(torch.tensor([world.local_rank])).flatten().tolist()
        ranks = [rank for rank, number in enumerate(local) if number == 0]  # one for each node
        self.hosts = {rank: world.broadcast_text(world.host, rank) for rank in ranks}

    def job(self, name: str, *words: str) -> Job:
        """Return a run of a few steps on digits, unless the words choose something else."""
        batch = f"data.global_batch={max(52, 4 * self.world.world_size)}"
        return Job(self.folder / name, [*rank_jobs.WORDS, batch, *self._words, *words])

    @property
    def stopped(self) -> str:
        """Say which signal asked this rank to stop."""
        return f"{self.signals.received.name} ended the run" if self.signals.received else ""

    def train(self, job: Job, alone: bool = False) -> None:
        """Train on all ranks, or in one process; a run that is complete is not repeated."""
        verdict, problem = job.run_dir.read_verdict(), ""
        if self.world.broadcast(verdict is not None and verdict.state == "done"):
            return
        if not alone:
            config = parse([*job.words, *job.run_dir.words])[1]
            train("accept", config, self.world, self.signals)
            problem = self.stopped
        elif self.world.is_main:
            try:
                rank_jobs.run([job], job.root / "logs", 1)
            except RuntimeError as error:
                problem = f"in one process: {str(error).strip().splitlines()[-1]}"
        if problem := self.world.first_problem(problem):
            raise Failed(problem)

    def compare(self, job: Job, other: Job, tolerances: Sequence[float]) -> str:
        """Compare losses and weights on rank 0; raise Failed if a difference is too large."""
        if not self.world.is_main:
            return ""
        logged = {line.step for line in job.run_dir.read_metrics()}  # all, unless ranks were lost
        same = [line.loss for line in other.run_dir.read_metrics() if line.step in logged]
        apart = rank_jobs.apart(job.losses(), [*same, other.losses()[-1]])
        weights, expected = (
            export.read(max(run.run_dir.checkpoints.iterdir()))["model"] for run in (job, other)
        )
        by_name = {
            name: float((weights[name] - value).double().norm() / value.double().norm().clamp(1e-9))
            for name, value in expected.items()
        }
        name = max(by_name, key=lambda name: (math.isnan(by_name[name]), by_name[name]))
        most = by_name[name]
        text = f"losses differ by {apart:.1e}, weights by {most:.1e} ({name})"
        if not (apart <= tolerances[0] and most <= tolerances[1]):
            raise Failed(f"{text}; allowed: {tolerances[0]:.0e} and {tolerances[1]:.0e}")
        return text if apart or most else "losses and weights are equal to the last bit"


def machine(setup: Setup) -> str:
    """Run the doctor on every node."""
    checked, by_node = {}, {}
    if setup.world.rank in setup.hosts:
        name = f"{setup.world.host}-{setup.world.rank}"
        words = nodes.doctor(setup.folder, f"--into={setup.folder}", f"--as-node={name}")
        checked = nodes.ask([words], setup.folder, [name], THOROUGH + 15)[name]
    for rank, host in setup.hosts.items():
        fields = setup.world.broadcast(checked, rank)
        by_node[f"{host} (rank {rank})"] = {
            name: Result(*values) for name, values in fields.items()
        }
    every = [(node, *result) for node, results in by_node.items() for result in results.items()]
    bad = [line for line in every if line[2].state == "bad"]
    wrong = [f"{name} on {node}: {result.text}" for node, name, result in bad]
    for check, outliers in compare(by_node).items():
        if check in MUST_MATCH:
            wrong += [f"{check} on {odd.node}: {odd.has}, others {odd.usual}" for odd in outliers]
    if wrong:
        raise Failed("; ".join(wrong))
    warned = dict.fromkeys(name for _, name, result in every if result.state == "warning")
    more = f"; warnings, which `rollcall doctor` explains: {', '.join(warned)}" if warned else ""
    return f"nodes: {len(by_node)}, checks on each: {len(checked)}{more}"


def _measured(setup: Setup) -> dict[str, Any]:
    if setup.world.world_size == 1:
        raise NotApplicable("one rank has nobody to talk to")
    return network.measure(setup.world, SIZES)


def links(setup: Setup) -> str:
    """Measure every link, as `rollcall network` does."""
    measured = _measured(setup)
    if measured["slow"]:
        raise Failed("; ".join(measured["slow"]))
    rates = [rate for row in measured["links"] for rate in row if rate]
    ends = len(measured["hosts"])
    return f"{len(rates)} links between {ends} ends, {size(min(rates))}/s at least"


def bandwidth(setup: Setup) -> str:
    """Compare the bus bandwidth of an all-reduce with the wire."""
    measured = _measured(setup)
    best = max(row["bus"] for row in measured["collectives"] if row["kind"] == "all-reduce")
    wire, share = measured["wire"], WIRE[measured["backend"]]
    text = f"all-reduce {size(best)}/s over {measured['interface']}"
    if measured["interface"] == "lo" or not wire:
        raise NotApplicable(f"{text}, which does not say how fast it can be")
    text += f", {best / wire:.0%} of the wire's {size(wire)}/s"
    if best < share * wire:
        raise Failed(f"{text}; expected {share:.0%} at least with {measured['backend']}")
    return text


def strategy(name: str, setup: Setup) -> str:
    """Train under a strategy, and compare with one process."""
    ranks, keys = STRATEGIES[name]
    if setup.world.world_size % ranks:
        count = setup.world.world_size
        raise NotApplicable(f"needs a multiple of {ranks} ranks; this run has {count}")
    kind = TEXT if name in ON_TEXT else ()
    alone = setup.job("alone-text" if kind else "alone", *kind, "parallel.strategy=single")
    job = setup.job(name.replace(" ", "-"), *kind, *(f"parallel.{key}" for key in keys))
    setup.train(alone, alone=True)
    setup.train(job)
    return setup.compare(job, alone, TOLERANCES[setup.world.device.type])


class Kill:
    """A callback that kills the last rank once its run has a checkpoint; not after a resume."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def settle(self, step: Step, agreed: Mapping[str, object]) -> None:  # noqa: ARG002
        """Kill this process."""
        run, world = self._run.run_dir, self._run.world
        is_it = world.rank == world.world_size - 1 and step.number >= KILLED_AFTER
        if is_it and any(run.checkpoints.glob("step-*")) and not run.read_events("resumed"):
            os.kill(os.getpid(), signal.SIGKILL)


def resume(setup: Setup) -> str:
    """Kill a rank while it trains; the launcher restarts all, and the run must end as if not."""
    kill = "train.callbacks={kill: {name: rollcall.tools.accept.checks:Kill}}"
    whole = setup.job("undisturbed", f"train.steps={STEPS}")
    job = setup.job("killed", f"train.steps={STEPS}", kill)
    setup.train(whole)
    setup.train(job)
    resumed = job.run_dir.read_events("resumed")
    if not resumed:
        raise Failed(f"no rank was killed: the run has no checkpoint after {STEPS} steps")
    compared = setup.compare(job, whole, RESUMED[setup.world.device.type])
    who = f"rank {setup.world.world_size - 1} got SIGKILL"
    return f"{who}, all resumed from step {resumed[0]['step']}: {compared}"


def exact(setup: Setup) -> str:
    """Train in exact mode, on all ranks and in one process."""
    ranks = setup.world.world_size
    shards = next((count for count in (8, 16, 32, 64, 128, 256) if not count % ranks), None)
    if shards is None:
        raise NotApplicable(f"{ranks} ranks divide no number of virtual shards, such as 8 or 16")
    words = ["exact=true", "log.fingerprints=true", "data.micro_batch=null"]
    words += [f"exact_shards={shards}", f"data.global_batch={8 * shards}"]
    alone, job = setup.job("exact-alone", *words), setup.job("exact", *words)
    setup.train(alone, alone=True)
    setup.train(job)
    if not setup.world.is_main:
        return ""
    hashes = [run.run_dir.read_events("finished")[-1]["weights"] for run in (job, alone)]
    if hashes[0] != hashes[1]:
        raise Failed(f"{difference.first(alone.run_dir, job.run_dir) or 'the weights differ'}")
    return f"{ranks} ranks and one process: sha256 {hashes[0][:16]} of the weights"


def memory_of_a_step(setup: Setup) -> str:
    """Compare what the ranks hold after a step with the plan's closed forms."""
    lines, ranks = [], setup.world.world_size
    for zero, name in ((0, "ddp"), (3, "zero3")):
        config = parse(setup.job(name, *TEXT, f"parallel.strategy={name}").words)[1]
        source = sets.load(config.data, setup.world)
        batch = next(validation_batches(source, 2, 0, 1)).to(setup.world.device)
        placed = Strategy(config, setup.world, losses.Objective(losses.of(config)))
        placed.place(models.build(config.model, source), batch)
        optimizer = placed.optimizer(partial(optim.build, config.optim))
        placed.forward_backward([batch], 2 * ranks)
        optimizer.step()
        weights = list(placed.model.parameters())
        state = [value for moments in optimizer.state.values() for value in moments.values()]
        tensors = [*weights, *(weight.grad for weight in weights), *state]
        whole = filter(torch.is_tensor, tensors)
        local = [getattr(tensor, "_local_tensor", tensor) for tensor in whole]
        held = setup.world.sum(sum(tensor.nbytes for tensor in local))[0] / ranks
        model, layout = plan_model.describe(config), Layout(ranks, zero=zero, precision="fp32")
        any_chip = Machines().machine("h100", precision="fp32")  # bytes are the same on all
        terms = memory.stage(model, layout, any_chip, 0, model.layers)
        planned = terms["weights"] + terms["gradients"] + terms["optimizer state"]
        lines.append(f"{name} {size(held)} a rank, planned {size(planned)}")
        if abs(held / planned - 1) > STATE:
            raise Failed(f"{lines[-1]}; allowed: {STATE:.0%}")
    return f"weights, gradients and optimizer state: {'; '.join(lines)}"


def overhead(setup: Setup) -> str:
    """Time a step beside a loop of ten lines, in turns on one CPU: `rollcall bench overhead`."""
    if not setup.world.is_main:
        return ""
    settings = loops.Settings("mlp", 200)
    ways = {name: partial(loops.measure, name, settings, 1) for name in ("bare", "rollcall")}
    times = turns.medians(turns.take_turns(ways, 3))
    bare, rollcall = (times[name]["CPU of a rank"] for name in ways)
    text = f"CPU of a step: {duration(rollcall)}, a bare loop {duration(bare)}"
    if rollcall - bare > OVERHEAD:
        raise Failed(f"{text}; allowed: {duration(OVERHEAD)} more")
    return text


CHECKS: dict[str, Callable[[Setup], str]] = {
    "machine": machine,
    "network": links,
    "bandwidth": bandwidth,
    **{f"strategy {name}": partial(strategy, name) for name in STRATEGIES},
    "kill and resume": resume,
    "exact mode": exact,
    "memory": memory_of_a_step,
    "overhead": overhead,
}
"""The checks of `request.CHECKS`: every rank calls each; rank 0's answer counts.

A check raises Failed or NotApplicable on any rank, but after its last collective.
"""
DEADLY = ("kill and resume",)
"""Checks that end the ranks on purpose, and then begin again."""


def main(argv: Sequence[str]) -> int:
    """Do the checks that earlier attempts have not done; return the exit code."""
    try:
        asked = request.read(argv[2:])
    except RefusedError as error:
        return refuse(error)
    return on_all_ranks(asked.device, partial(_work, Path(argv[0]), argv[1], asked))


def _work(folder: Path, command: str, asked: Request, world: World, signals: StopSignals) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    setup = Setup(world, signals, folder, asked.words)
    if world.is_main:
        kind = world.device.type
        ranks = f"{world.world_size} on {listed(sorted({*setup.hosts.values()}))}, {kind}"
        Facts({"command": command, "ranks": ranks, **turns.surroundings()}).append(folder)
    known = world.broadcast([asdict(row) for row in page.read(folder).rows])
    rows = {fields["check"]: Row(**fields) for fields in known}
    for name in asked.checks:
        row = rows.get(name, Row(name))
        if row.state in ("", "began"):
            row = _check(name, row, setup)
            if world.is_main:
                row.append(folder)
                page.read(folder).write(folder)  # the waiting command may have been closed
                print(f"{row.state}: {name}: {row.text}", flush=True)
        if world.first_problem(setup.stopped):
            return 1
    return 0


def _check(name: str, before: Row, setup: Setup) -> Row:
    """Do a check; `before` is what an earlier attempt recorded of it."""
    again = before.state == "began"
    if again and (name not in DEADLY or before.text):
        run = RunDir(setup.folder.parent.parent, setup.folder.parent.name)
        attempts = find.attempts(run)[-2:-1]
        cause = attempts and root_cause.find_cause(run, Condition("failed"), attempts[0])
        return replace(before, state="failed", text=f"the ranks ended: {cause and cause.what}")
    begin = time.time()
    if setup.world.is_main:
        Row(name, "began", 0, "again" if again else "").append(setup.folder)
    text = problem = absent = ""
    with (
        (setup.folder / f"rank-{setup.world.rank}.log").open("a") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        try:
            text = CHECKS[name](setup)
        except (Failed, ConfigError) as error:
            problem = str(error)
        except NotApplicable as error:
            absent = str(error)
    taken = time.time() - begin
    if problem := setup.world.first_problem(problem):
        return Row(name, "failed", taken, problem)
    if absent := setup.world.first_problem(absent):
        return Row(name, "not applicable", taken, absent)
    return Row(name, "passed", taken, text)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
