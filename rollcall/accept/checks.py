"""`python -m rollcall.accept.checks FOLDER …`: the checks of `rollcall accept`, on all ranks.

A check calls what another command calls, and says in a line what it found. An exception ends the
ranks; their launcher starts them again, and the next attempt continues behind that check.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollcall.accept import page
from rollcall.accept.page import Row
from rollcall.bench import loops, turns
from rollcall.config import ConfigError, parse
from rollcall.launch.doctor import nodes
from rollcall.launch.doctor.check import THOROUGH, Found
from rollcall.launch.doctor.checkup import MUST_MATCH, compare
from rollcall.launch.doctor.software import OF_RANKS
from rollcall.launch.runs import find, root_cause
from rollcall.launch.runs.states import Condition
from rollcall.planning import memory
from rollcall.planning.layout import Layout
from rollcall.process import leave
from rollcall.records.files import read_object, write_atomic
from rollcall.run_dir import RunDir
from rollcall.text import duration, size
from rollcall.train import matrix, models, network, plan_model
from rollcall.train.checkpoint.tools import export
from rollcall.train.data import sets
from rollcall.train.data.order import validation_batches
from rollcall.train.dist.agreement import Action
from rollcall.train.dist.run import Run
from rollcall.train.dist.signals import StopSignals
from rollcall.train.dist.world import World
from rollcall.train.exact import difference
from rollcall.train.main import on_all_ranks
from rollcall.train.matrix import Job
from rollcall.train.numerics import losses, optim
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.training import train

TOLERANCES = {"cpu": (matrix.TOLERANCE, 1e-4), "cuda": (1e-3, 1e-2)}
"""Allowed relative differences of a loss, and of a weight by its norm. AdamW turns the last bits of
a gradient near zero into a part of a step. Those of GPUs have not been tried yet."""
WIRE = {"nccl": 0.5, "gloo": 0.02}
"""Share of the wire that the largest collective must reach; gloo copies on the CPU."""
STATE = 0.03
"""Allowed relative difference of the memory of weights, gradients and optimizer from the plan."""
OVERHEAD = 2e-3
"""Seconds of CPU that a step may take beyond a loop of ten lines."""
SIZES = (2**16, 2**20, 2**24)
"""Bytes of the collectives."""
KILLED_AFTER, RESUMED_STEPS = 6, 24
TEXT = (
    *("data.name=text", "data.seq_len=64", "model.name=gpt", "model.hidden_size=64"),
    *("model.num_layers=2", "optim.lr=1e-3", "train.steps=4", "data.micro_batch=4"),
)
STRATEGIES: dict[str, tuple[int, Sequence[str]]] = {
    "ddp": (1, ["strategy=ddp"]),
    "zero1": (1, ["strategy=zero1"]),
    "zero2": (1, ["strategy=zero2"]),
    "zero3": (1, ["strategy=zero3"]),
    "hsdp": (4, ["strategy=hsdp", "mesh=replicate=2,shard=rest"]),
    "tensor": (2, ["mesh=tensor=2,replicate=rest"]),
    "pipeline": (2, ["mesh=pipeline=2,replicate=rest"]),
    "split": (2, ["strategy=split", "mesh=pipeline=2,replicate=rest"]),
    "context": (2, ["mesh=context=2,replicate=rest"]),
    "sequence": (2, ["mesh=tensor=2,replicate=rest", "sequence_parallel=true"]),
    "zero3 and tensor": (4, ["mesh=shard=rest,tensor=2"]),
}
"""By name: the number of ranks that must divide the world, and the keys of `parallel`."""
ON_TEXT = ("context", "sequence", "zero3 and tensor")


class NotApplicable(Exception):
    """A check has no meaning here; the message says why."""


class Failed(Exception):
    """What was checked is wrong; the message says how."""


class Setting:
    """What all checks know: the ranks, the folder of this acceptance, and keys for every run."""

    def __init__(self, world: World, signals: StopSignals, folder: Path, words: Sequence[str]):
        self.world, self.signals, self.folder = world, signals, folder
        self._words = [*words, f"device={world.device.type}"]
        self.tolerances = TOLERANCES[world.device.type]

    def job(self, name: str, on_text: bool, *words: str) -> Job:
        """Return a run: of a few steps on digits, or on text with a small transformer."""
        batch = f"data.global_batch={max(16 if on_text else 50, 4 * self.world.world_size)}"
        kind = TEXT if on_text else ()
        return Job(self.folder / name, [*matrix.WORDS, *kind, batch, *self._words, *words])

    def train(self, job: Job) -> None:
        """Train on all ranks; a run that is complete is not repeated."""
        if self.world.broadcast(_is_done(job)):
            return
        job.root.mkdir(parents=True, exist_ok=True)
        words = [*job.words, f"run.root={job.root}", "run.name=run"]
        state = train("accept", parse(words)[1], self.world, self.signals)
        if state != "done":
            raise Failed(f"the run ended as '{state}': {job.run_dir.path}")

    def alone(self, job: Job) -> None:
        """Train in one process, which rank 0 starts, while the others wait."""
        problem = ""
        if self.world.is_main and not _is_done(job):
            try:
                matrix.run([job], job.root / "logs", 1)
            except RuntimeError as error:
                problem = f"in one process: {str(error).strip().splitlines()[-1]}"
        if problem := self.world.first_problem(problem):
            raise Failed(problem)

    def compare(self, one: Job, other: Job, tolerances: Sequence[float]) -> str:
        """Compare losses and weights; rank 0 reads them.

        Raises:
            Failed: a difference is too large.
        """
        if not self.world.is_main:
            return ""
        pairs = [*zip(one.losses(), other.losses(), strict=True)]
        apart = [max(abs(a - b) / abs(b) for a, b in pairs)]
        first, second = (
            export.read(max(job.run_dir.checkpoints.iterdir())) for job in (one, other)
        )
        model, expected = first["model"], second["model"]
        norms = ((it, (model[it] - expected[it]).norm() / expected[it].norm()) for it in expected)
        worst, most = max(((it, float(apart)) for it, apart in norms), key=lambda pair: pair[1])
        found = f"losses differ by {apart[0]:.1e}, weights by {most:.1e} ({worst})"
        if not (apart[0] <= tolerances[0] and most <= tolerances[1]):
            raise Failed(f"{found}; allowed: {tolerances[0]:.0e} and {tolerances[1]:.0e}")
        return found if apart[0] or most else "losses and weights are equal to the last bit"


def _is_done(job: Job) -> bool:
    verdict = job.run_dir.read_verdict()
    return verdict is not None and verdict.state == "done"


def _leaders(world: World) -> dict[int, str]:
    """Return the first rank of each node, and the name of its host."""
    local = world.gather(torch.tensor([world.local_rank])).flatten().tolist()
    ranks = [rank for rank, place in enumerate(local) if place == 0]
    names = [world.broadcast_text(world.host, rank) for rank in ranks]
    return {
        rank: name if names.count(name) == 1 else f"{name}-{number}"
        for number, (rank, name) in enumerate(zip(ranks, names, strict=True))
    }


def machine(it: Setting) -> str:
    """Run the doctor on every node."""
    leaders, own, found = _leaders(it.world), {}, {}
    if name := leaders.get(it.world.rank):
        into = it.folder / f"doctor-{it.world.rank}"
        into.mkdir(exist_ok=True)
        leaked = [one for one in os.environ if one.startswith("TORCHELASTIC_") or one in OF_RANKS]
        words = ["env", *(f"--unset={one}" for one in leaked)]
        words += nodes.doctor(it.folder, f"--into={into}", f"--as-node={name}")
        own = nodes.ask([words], into, [name], THOROUGH + 15)[name]
    for rank, name in leaders.items():
        fields = it.world.broadcast(own, rank)
        found[name] = {check: Found(*values) for check, values in fields.items()}
    problems = [
        f"{check} on {node}: {result.text}"
        for node, results in found.items()
        for check, result in results.items()
        if result.state == "bad"
    ]
    for check, odd in compare(found).items():
        if check in MUST_MATCH:
            problems += [f"{check} on {one.node}: {one.has}, others {one.usual}" for one in odd]
    if problems:
        raise Failed("; ".join(problems))
    warned = {
        it for results in found.values() for it, one in results.items() if one.state == "warning"
    }
    more = f"; warnings, which `rollcall doctor` explains: {', '.join(warned)}" if warned else ""
    return f"nodes: {len(found)}, checks on each: {len(own)}{more}"


def _measured(it: Setting) -> dict[str, Any]:
    if it.world.world_size == 1:
        raise NotApplicable("one rank has nobody to talk to")
    file = it.folder / "network.json"
    found = it.world.broadcast(read_object(file) if it.world.is_main else None)
    if found is None:
        found = network.measure(it.world, SIZES)
        if it.world.is_main:
            write_atomic(file, json.dumps(found))
    return dict(found)


def links(it: Setting) -> str:
    """Measure every link, as `rollcall network` does."""
    found = _measured(it)
    if found["slow"]:
        raise Failed("; ".join(found["slow"]))
    rates = [rate for row in found["links"] for rate in row if rate]
    return f"{len(rates)} links between {len(found['hosts'])} ends, {size(min(rates))}/s at least"


def bandwidth(it: Setting) -> str:
    """Compare the bus bandwidth of an all-reduce with the wire."""
    found = _measured(it)
    best = max(row["bus"] for row in found["collectives"] if row["kind"] == "all-reduce")
    wire, share = found["wire"], WIRE[found["backend"]]
    text = f"all-reduce {size(best)}/s over {found['interface']}"
    if found["interface"] == "lo":
        raise NotApplicable(f"the ranks are on one machine, without a wire; {text}")
    if not wire:
        raise NotApplicable(f"{found['interface']} does not say how fast it is; {text}")
    text += f", {best / wire:.0%} of the wire's {size(wire)}/s"
    if best < share * wire:
        raise Failed(f"{text}; expected {share:.0%} at least with {found['backend']}")
    return text


def strategy(name: str, it: Setting) -> str:
    """Train under a strategy, and compare with one process."""
    ranks, keys = STRATEGIES[name]
    if it.world.world_size % ranks or it.world.world_size == 1:
        expected = f"a multiple of {ranks} ranks" if ranks > 1 else "two ranks"
        raise NotApplicable(f"it needs {expected}, here are {it.world.world_size}")
    on_text = name in ON_TEXT
    alone = it.job("alone-text" if on_text else "alone", on_text, "parallel.strategy=single")
    job = it.job(name.replace(" ", "-"), on_text, *(f"parallel.{key}" for key in keys))
    it.alone(alone)
    it.train(job)
    return it.compare(job, alone, it.tolerances)


class Kill:
    """A callback that kills the last rank once its run has a checkpoint; not after a resume."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._is_last = run.world.rank == run.world.world_size - 1

    def settle(self, step: int, agreed: Mapping[str, Any]) -> Action:  # noqa: ARG002
        """Kill this process."""
        run = self._run.run_dir
        is_time = self._is_last and step >= KILLED_AFTER and any(run.checkpoints.glob("step-*"))
        if is_time and not run.read_events("resumed"):
            os.kill(os.getpid(), signal.SIGKILL)
        return Action.CONTINUE


def resume(it: Setting) -> str:
    """Kill a rank while it trains; the launcher restarts all, and the run must end as if not."""
    steps = f"train.steps={RESUMED_STEPS}"
    whole = it.job("undisturbed", False, steps)
    job = it.job(
        "killed", False, steps, "train.callbacks={kill: {name: rollcall.accept.checks:Kill}}"
    )
    it.train(whole)
    it.train(job)
    resumed = job.run_dir.read_events("resumed")
    if not resumed:
        raise Failed(f"no rank was killed: there was no checkpoint within {RESUMED_STEPS} steps")
    found = it.compare(job, whole, it.tolerances if it.world.device.type == "cuda" else (0, 0))
    who = f"rank {it.world.world_size - 1} got SIGKILL"
    return f"{who}, all resumed from step {resumed[0]['step']}: {found}"


def exact(it: Setting) -> str:
    """Train in exact mode, on all ranks and in one process."""
    ranks = it.world.world_size
    shards = next((one for one in (8, 16, 32, 64, 128, 256) if not one % ranks), None)
    if shards is None:
        raise NotApplicable(f"{ranks} ranks do not divide a number of virtual shards, as 8 or 16")
    words = ["exact=true", "log.fingerprints=true", f"exact_shards={shards}"]
    words += ["data.micro_batch=null", f"data.global_batch={8 * shards}"]
    alone, job = (it.job(name, False, *words) for name in ("exact-alone", "exact"))
    it.alone(alone)
    it.train(job)
    if not it.world.is_main:
        return ""
    hashes = [one.run_dir.read_events("finished")[-1]["weights"] for one in (job, alone)]
    if hashes[0] != hashes[1]:
        raise Failed(f"{difference.first(alone.run_dir, job.run_dir) or 'the weights differ'}")
    return f"{ranks} ranks and one process: sha256 {hashes[0][:16]} of the weights"


def memory_of_a_step(it: Setting) -> str:
    """Compare what the ranks hold after a step with the plan's closed forms."""
    found = []
    for zero, name in ((0, "ddp"), (3, "zero3")):
        words = [*TEXT, "data.global_batch=64", f"parallel.strategy={name}"]
        config = parse([*words, f"device={it.world.device.type}"])[1]
        source = sets.load(config.data, it.world)
        batch = next(validation_batches(source, 2, 0, 1)).to(it.world.device)
        placed = Strategy(config, it.world, losses.Objective(losses.of(config)))
        placed.place(models.build(config.model, source), batch)
        optimizer = placed.optimizer(partial(optim.build, config.optim))
        placed.forward_backward([batch], 2 * it.world.world_size)
        optimizer.step()
        weights = list(placed.model.parameters())
        state = [value for one in optimizer.state.values() for value in one.values()]
        tensors = [*weights, *(weight.grad for weight in weights), *state]
        local = [getattr(one, "_local_tensor", one) for one in tensors if torch.is_tensor(one)]
        held = sum(one.nbytes for one in local)
        [total] = it.world.sum(held)
        model = plan_model.describe(config)
        layout = Layout(data=it.world.world_size, zero=zero, micro=2, precision="fp32")
        terms = memory.stage(model, layout, 0, model.layers)
        planned = terms["weights"] + terms["gradients"] + terms["optimizer state"]
        mean = total / it.world.world_size
        found.append(f"{name} {size(mean)} a rank, planned {size(planned)}")
        if abs(mean / planned - 1) > STATE:
            raise Failed(f"{found[-1]}; allowed: {STATE:.0%}")
    return f"weights, gradients and optimizer state: {'; '.join(found)}"


def overhead(it: Setting) -> str:
    """Time a step beside a loop of ten lines: `rollcall bench overhead`, in turns on one CPU."""
    if not it.world.is_main:
        return ""
    settings = loops.Settings("mlp", 200)
    ways = {name: partial(loops.measure, name, settings, 1) for name in ("bare", "rollcall")}
    found = turns.medians(turns.take_turns(ways, 3))
    bare, own = (found[name]["CPU of a rank"] for name in ways)
    text = f"CPU of a step: {duration(own)}, a bare loop {duration(bare)}"
    if own - bare > OVERHEAD:
        raise Failed(f"{text}; allowed: {duration(OVERHEAD)} more")
    return text


CHECKS: dict[str, Callable[[Setting], str]] = {
    "machine": machine,
    "network": links,
    "bandwidth": bandwidth,
    **{f"strategy {name}": partial(strategy, name) for name in STRATEGIES},
    "kill and resume": resume,
    "exact mode": exact,
    "memory": memory_of_a_step,
    "overhead": overhead,
}
"""All checks in their order: every rank calls each; rank 0's answer counts.

A check raises `Failed` or `NotApplicable` on any rank, but after its last collective.
"""
DEADLY = ("kill and resume",)
"""Checks that end the ranks on purpose, and then begin again."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of what follows `--` on the command line."""
    made = argparse.ArgumentParser("rollcall accept ... --", allow_abbrev=False)
    names = f"only these, separated by commas: {', '.join(dict.fromkeys(map(_kind, CHECKS)))}"
    made.add_argument("--only", type=_chosen, default=[*CHECKS], metavar="CHECK,…", help=names)
    made.add_argument("--device", default="auto", help="cpu or cuda (default: auto)")
    made.add_argument("words", nargs="*", metavar="key=value", help="for every training")
    return made


def _kind(name: str) -> str:
    return "strategy" if name.startswith("strategy") else name


def _chosen(text: str) -> list[str]:
    wanted = text.split(",")
    known = [*CHECKS, "strategy"]
    if wrong := [name for name in wanted if name not in known]:
        raise argparse.ArgumentTypeError(
            f"unknown check '{wrong[0]}'; choose from {', '.join(known)}"
        )
    return [name for name in CHECKS if name in wanted or _kind(name) in wanted]


def main(argv: Sequence[str]) -> int:
    """Do the checks that earlier attempts have not done; return the exit code."""
    options = parser().parse_args(argv[1:])
    return on_all_ranks(options.device, partial(_work, Path(argv[0]), options))


def _work(folder: Path, options: argparse.Namespace, world: World, signals: StopSignals) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    it = Setting(world, signals, folder, options.words)
    hosts = _leaders(world)
    if world.is_main and not page.read(folder, "").facts:
        page.record_facts(folder, _facts(world, [*hosts.values()], options))
    known = world.broadcast([asdict(row) for row in page.read(folder, "").rows])
    rows = {fields["check"]: Row(**fields) for fields in known}
    for name in options.only:
        row = rows.get(name, Row(name))
        if row.state in ("", "began"):
            row = _check(name, row, it)
            if world.is_main:
                page.record(folder, row)
                print(f"{row.state}: {name}: {row.text}", flush=True)
    return 0


def _check(name: str, before: Row, it: Setting) -> Row:
    """Do a check; `before` is what an earlier attempt recorded of it."""
    again = before.state == "began"
    if again and (name not in DEADLY or before.text):
        run = RunDir(it.folder.parent.parent, it.folder.parent.name)
        attempts = find.attempts(run)[-2:-1]
        cause = attempts and root_cause.find_cause(run, Condition("failed"), attempts[0])
        what = cause.what if cause else "the cause is unknown"
        return Row(name, "failed", 0.0, f"the ranks ended: {what}")
    begin = before.seconds if again else time.time()
    if it.world.is_main:
        page.record(it.folder, Row(name, "began", begin, "again" if again else ""))
    text = problem = absent = ""
    with (
        (it.folder / f"rank-{it.world.rank}.log").open("a") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        try:
            text = CHECKS[name](it)
        except (Failed, ConfigError) as error:
            problem = str(error)
        except NotApplicable as error:
            absent = str(error)
    taken = time.time() - begin
    if problem := it.world.first_problem(problem):
        return Row(name, "failed", taken, problem)
    if absent := it.world.first_problem(absent):
        return Row(name, "not applicable", taken, absent)
    return Row(name, "passed", taken, text)


def _facts(world: World, hosts: Sequence[str], options: argparse.Namespace) -> dict[str, str]:
    is_gpu = world.device.type == "cuda"
    ranks = f"{world.world_size} on {', '.join(hosts)}, {world.device.type}"
    ranks += " with NCCL" if is_gpu else " with gloo"
    left_out = [name for name in CHECKS if name not in options.only]
    only = {"left out on request": ", ".join(left_out)} if left_out else {}
    words = {"keys": shlex.join(options.words)} if options.words else {}
    return {"ranks": ranks, **turns.surroundings(), **only, **words}


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
