"""Check before the first step of a run that the ranks together compute what one would.

Two samples pass through the plain model on every rank and then through the spread one, in training
mode, where random operations give expected values: outputs, loss, gradients and the weights that
forward() changes must agree. Then they pass with random numbers, and the ranks of a tensor group
must agree wherever they compute the same. Under every strategy the samples also pass one by one:
see `rows.py`. Nothing remains of these passes.
"""

import fnmatch
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from rollcall.config import ConfigError
from rollcall.config.mesh import parse
from rollcall.messages.text import listed, size
from rollcall.train.data.source import Batch
from rollcall.train.health import crosscheck, rows
from rollcall.train.health.passes import Pass, Sketch, gradients, outputs, sketch, tolerance
from rollcall.train.numerics.examination import examined
from rollcall.train.numerics.randomness import next_numbers, set_seed
from rollcall.train.parallel.part import evaluating, explain, explanation
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks import failure
from rollcall.train.ranks.device import whole_of
from rollcall.train.ranks.meeting import Failed, Meeting
from rollcall.train.ranks.run import Run
from rollcall.train.recovery import memory
from rollcall.train.torch_private import BatchNorm, without_modes

EVENT = "spread_checked"
MORE = 8
"""Samples of which the check sees what few of them use or change."""
Whole = Callable[[nn.Module, torch.device], AbstractContextManager[None]]
Result = TypeVar("Result")


class Unsplit(Exception):
    """Raised if samples could not pass one by one."""


class Spread:
    """The check for one run on one rank; every rank makes each call together."""

    def __init__(self, run: Run, strategy: Strategy, samples: Callable[..., Batch]) -> None:
        """Check with the two samples of `samples()`, and with more where two are not enough."""
        self._run, self._world, self._strategy, self._more = run, run.world, strategy, samples
        self._meeting, self._rank = Meeting(run.world), f"rank {run.world.rank}"
        self.is_on = run.config.parallel.check != "off"
        self.example = samples()
        self._samples = self.example.map(torch.clone)
        axes = {*parse(run.config.parallel.mesh_text)}
        self._is_pipeline = strategy.degrees.get("pipeline", 1) > 1
        self._cuts_samples = bool(axes & {"context", "tensor", "pipeline"})
        self._compares = strategy.changes_passes and run.world.world_size > 1
        self._plain: Pass | None = None
        self.is_due = False  # whether `compare` will compare what the spread model computes
        self._is_cut = run.config.data.micro_batch is not None
        self._key, self._tolerance, self._of_stored, self._seconds = "", 0.0, 0.0, 0.0

    def compute_plain(self, model: nn.Module, whole: Whole) -> None:
        """Pass the samples through the model before it is spread, if it has to be compared.

        The context `whole` gives the model all its values. Raise ConfigError on every rank if their
        models differ, or samples depend on each other, and Failed if one has too little memory.
        """
        config, world = self._run.config, self._world
        if not self.is_on or not (world.world_size > 1 or self._is_cut):
            return
        modules = model.named_modules() if self._compares else ()
        chosen = [(name, m) for name, m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        if sparse := [name for name, m in chosen if m.sparse and m.weight.requires_grad]:
            raise ConfigError(
                f"{config.parallel.choice} cannot add up the sparse gradient of {listed(sparse)}: "
                "leave out sparse=True, or choose parallel.strategy=ddp"
            )
        self._key = _digest(self._run)
        events = self._run.run_dir.read_events(EVENT) if world.is_main else []
        if world.broadcast(bool(events) and events[-1].get("key") == self._key):
            return
        self.is_due = not self._left_out(self._obstacle(model))
        if not (self.is_due and self._compares):
            return

        compute = partial(self._strategy.plain_pass, model, backward=True, beside=True)
        with ExitStack() as stack:
            self._try(lambda: stack.enter_context(whole(model, world.device)))
            plain = self._try(lambda: self._pass(model, compute, self._samples))
            model.zero_grad()
            world.raise_together(self._different_weights(plain.loss))
            self._refuse_dependence(model, plain)
        problem = "" if math.isfinite(plain.loss) else "its loss is not finite"
        if plain.has_drawn and self._cuts_samples:
            problem = "the model draws random numbers whose expected value is not known"
        self.is_due = not self._left_out(problem)
        if self.is_due:
            self._plain = plain

    def compare(self) -> None:
        """Pass the samples through the spread model; raise ConfigError on all if it differs."""
        if not self.is_due:
            return
        strategy, samples = self._strategy, self._samples
        model, compute = strategy.model, strategy.example_pass
        if not self._compares:
            self._refuse_dependence(model)
        elif (plain := self._plain) is not None:

            def spread(**how: bool) -> Pass:
                work = partial(self._pass, model, compute, samples, **how)
                return self._in_schedule(work) if self._is_pipeline else self._try(work)

            if self._is_pipeline:  # whose stages send in other orders, and could not meet
                in_turn = partial(strategy.pass_in_turn, meeting=self._meeting)
                self._try(partial(self._pass, model, in_turn, samples), nullcontext)
            self._refuse_difference(plain, spread)
            if strategy.copies > 1 and self._world.has_any(plain.is_random):
                model.zero_grad()
                self._refuse(self._disagreement(plain, spread(draws=True)))
        model.zero_grad()
        self._plain = None

    def record(self) -> None:
        """Record the check in the run directory, so that a restart need not repeat it."""
        if self.is_due:
            self._run.record(EVENT, key=self._key, seconds=round(self._seconds, 4))

    def _left_out(self, reason: str) -> bool:
        """Return True if a rank has a reason to leave the check out, which rank 0 prints."""
        if reason := self._world.first_problem(reason):
            self._run.say(f"rollcall: parallel.check was left out: {reason}")
        return bool(reason)

    def _in_schedule(self, work: Callable[[], Result]) -> Result:
        """Return the result of a pass through a pipeline, in whose schedule ranks cannot meet."""
        begun = time.perf_counter()
        try:
            result = work()
        except (MemoryError, RuntimeError) as error:
            explain(error)
            if not memory.is_exhausted(error):
                raise
            raise MemoryError(
                f"parallel.check: {self._rank} has too little memory for it, and the other stages "
                "of the pipeline wait for it; set parallel.check=off"
            ) from error
        self._seconds += time.perf_counter() - begun
        return result

    def _try(
        self,
        work: Callable[[], Result],
        attempt: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> Result:
        """Return the result of some work, an attempt unless it makes its own; or fail on all ranks.

        Raise Failed on all if a rank has too little memory. After another error, a rank raises its
        own, or else Unsplit or ConfigError with that of the first rank.
        """
        problem, begun = "", time.perf_counter()
        raised: BaseException | None = None
        original: BaseException | None = None
        try:
            with (attempt or self._meeting.attempt)():
                result = work()
                self._seconds += time.perf_counter() - begun
            return result
        except Failed:
            pass
        except (Exception, SystemExit) as error:
            if memory.is_exhausted(error):
                problem = f"{self._rank} has too little memory for it"
            elif isinstance(error, Unsplit | ConfigError):
                raised = error
            elif cause := explanation(error):
                raised = ConfigError(cause)
                raised.__cause__ = error
            else:
                original, what = error, failure.describe(error)
                raised = ConfigError(
                    f"{self._rank} failed in the check before the first step: {what}"
                )
        for kind in (ConfigError, Unsplit):
            is_kind = isinstance(raised, kind)
            if first := self._world.first_problem(str(raised) if is_kind else ""):
                raise (original or raised if is_kind else None) or kind(first)
        self._left_out(problem)
        raise Failed

    def _refuse(self, problem: str) -> None:
        """Raise ConfigError on every rank if one has a problem, or print it as a warning."""
        problem = self._world.first_problem(problem)
        if problem and self._run.config.parallel.check != "warn":
            raise ConfigError(f"{problem}; or set parallel.check=warn to train anyway")
        self._run.warn(problem)

    def _obstacle(self, model: nn.Module) -> str:
        """Return the reason if the models cannot be compared; empty if they can."""
        config, world = self._run.config, self._world
        if config.precision == "fp8":
            return "precision=fp8 scales each piece of a tensor by its own largest number"
        if not self._compares:
            return ""
        if config.parallel.compression != "none":
            return f"parallel.compression={config.parallel.compression} changes the gradients"
        needed = 2 * sum(weight.nbytes for weight in model.parameters())
        free = memory.free(world)
        if 2 * needed > free:
            return (
                f"the weights and gradients of the plain model take {size(needed)}, more than half "
                f"of the {size(free)} that rank {world.rank} has free"
            )
        return ""

    def _pass(
        self, model: nn.Module, compute: Any, batch: Batch, draws: bool = False, names: bool = True
    ) -> Pass:
        """Pass some samples forward, or both ways if `compute` does that, and note what happens.

        BatchNorm trains only where numbers are drawn. Without `names`, only the output of the
        whole model is noted, which takes half of the time.
        """
        device = self._world.device
        modes = nullcontext() if draws else evaluating(model, BatchNorm)
        set_seed(self._run.config.seed, "check")
        undrawn = next_numbers()[:2]  # `seen` knows those of torch
        meeting = None if self._is_pipeline else self._meeting  # stages send in other orders
        with examined(model, self._strategy.loss.function, device, draws, meeting) as seen, modes:
            with outputs(model, names) as of_modules:
                sums = compute(batch.to(device).map(torch.clone))
            is_random = seen.is_random  # before the next line draws
            has_drawn = seen.has_drawn or undrawn != next_numbers()[:2]
            if not self._tolerance:  # the first pass is one of the plain model
                formats = {*seen.formats, *([torch.bfloat16] if self._strategy.rounds else [])}
                stored = {weight.dtype for weight in model.parameters()}
                self._tolerance = tolerance(model, formats)
                self._of_stored = tolerance(model, formats | stored)  # a gradient has that format
            with without_modes(), meeting or nullcontext():
                numbers = Pass(of_modules, seen.changed(), gradients(model, device), *sums)
            return numbers._replace(has_drawn=has_drawn, is_random=has_drawn or is_random)

    def _passes(self, model: nn.Module, parts: list[Batch], names: bool) -> list[Pass]:
        """Pass samples part by part; raise Unsplit with the reason if that fails."""
        compute = partial(self._strategy.plain_pass, model)
        try:  # with gradients, as in training: a loss may ask for that
            return [
                self._pass(model, partial(compute, beside=part is self._samples), part, names=names)
                for part in parts
            ]
        except Exception as error:  # the user's code may raise anything
            if memory.is_exhausted(error) or isinstance(error, ConfigError):
                raise
            text = f"parallel.check did not compute samples one by one: {error}"
            raise Unsplit(text) from error

    def _single(
        self, model: nn.Module, plain: Pass | None, names: bool, shared: bool = False
    ) -> list[Pass]:
        """Pass the samples together, unless that is known, and one by one, or one if `shared`."""
        # Of a recomputation, a backward pass would change buffers once more.
        passes = [plain] if plain and not plain.changed else []
        # A loss that calls the model sees others only in one batch: here, the same samples.
        calls_model = self._strategy.loss.takes_model
        twice = [Batch.joined([self._samples] * 2)] if calls_model else []
        alone = self._samples.split(1)
        alone = [alone[self._world.rank % 2]] if shared else alone
        together = [] if passes else [self._samples]
        passes += self._passes(model, [*together, *alone, *twice], names)
        if calls_model:
            total, double = passes.pop().total, 2 * passes[0].total
            passes[0] = passes[0]._replace(change=abs(total - double) / (abs(double) or 1.0))
        return passes

    @property
    def _rows_at_once(self) -> int:
        data = self._run.config.data
        return int(data.micro_batch or len(self._strategy.rows(data.global_batch)))

    def _refuse_dependence(self, model: nn.Module, plain: Pass | None = None) -> None:
        """Refuse the run if a sample's results depend on others."""
        world = self._world
        shared = plain is not None and not world.has_any(bool(plain.changed) or self._meeting.sent)
        try:
            single = self._try(lambda: self._single(model, plain, names=False, shared=shared))
        except Unsplit as error:
            self._run.warn(str(error))
            return
        if shared:  # this rank has passed one of the samples, and needs the sums of the other
            passed, other = single.pop(), 2 - world.rank % 2
            sums = world.gather(torch.tensor([passed.total, passed.weight], dtype=torch.float64))
            single += [
                passed._replace(total=total, weight=part) for total, part in sums[:2].tolist()
            ]
            single[other] = single[other]._replace(outputs={name: [] for name in passed.outputs})
        if world.has_any(bool(self._depends(single))):
            with suppress(Failed, Unsplit):
                named = self._try(lambda: self._single(model, plain, names=True))  # names a module
                single = named if self._depends(named) else single
        needs_others = self._strategy.gathers or world.has_any(bool(single[0].changed))
        # Few samples use some layers and embeddings. Each rank passes its share of six others.
        count = -(-(MORE - 2) // world.world_size)
        first = 2 + world.rank * count % (MORE - 2)
        more = self._more(MORE).map(lambda rows: rows[first:][:count]) if needs_others else None
        parts = [*more.split(self._rows_at_once)] if more else []
        others, reason = list[Pass](), None
        try:
            with suppress(Unsplit):
                others = self._try(lambda: self._passes(model, parts, names=False))
        except Failed as error:  # what was seen is refused all the same
            reason = error
        self._refuse(self._dependence(model, single, others))
        self._refuse(self._own_tensors(model, single, others))
        if reason:
            raise reason

    def _depends(self, single: list[Pass]) -> tuple[str, float] | None:
        """Return the module of the first output that depends on other samples, and by how much."""
        if single[0].has_drawn:  # in another order
            return None
        gather = self._run.config.train.gather
        return rows.dependence(single[0], single[1:], self._tolerance, gather)

    def _dependence(self, model: nn.Module, single: list[Pass], others: list[Pass]) -> str:
        """Return a problem if outputs, the loss or gradients depend on the other samples."""
        strategy, whole = self._strategy, single[0]
        parallel, config = self._run.config.parallel, self._run.config.train
        known = parallel.conditional_patterns
        some = rows.conditional(model, [*single[1:], *others], known, self._world)
        if some and strategy.gathers:
            return (
                f"{parallel.choice} gathers weights on all ranks together, but only some samples "
                f"use {listed(some)}: set parallel.conditional={','.join(some)} to keep them whole "
                "on each rank, or choose parallel.strategy=ddp or zero1"
            )
        if different := self._depends(single):
            module, size_of_error = different
            what = f"the output of {module}" if module else f"train.loss={config.loss}"
            remedy = "" if module else ": set train.gather=true to give it the samples of all ranks"
            if strategy.loss.takes_model and not module:
                remedy = ": let its sums grow with the number of samples, also what it adds to them"
                remedy += "; to compare samples, let it take (outputs, targets) and train.gather"
            return (
                f"{what} depends on the other samples of a batch: with other samples it is "
                f"something else (by {size_of_error:.1e} of its size), so the result would depend "
                f"on the number of ranks and on data.micro_batch{remedy}"
            )
        for name, module in model.named_modules():
            if getattr(module, "scale_grad_by_freq", False):  # only a backward pass shows it
                return (
                    f"the gradient of {name} depends on the other samples of a batch, so the "
                    "result would depend on the number of ranks and on data.micro_batch: leave out "
                    "scale_grad_by_freq=True"
                )
        if self._is_cut and whole.changed:
            self._run.warn(
                f"forward() changes {listed([*whole.changed])} once in each micro-batch, so the "
                "result depends on data.micro_batch"
            )
        return ""

    def _own_tensors(self, model: nn.Module, single: list[Pass], others: list[Pass]) -> str:
        """Return a problem if forward() changes tensors by the samples that a rank sees."""
        strategy = self._strategy
        if self._world.world_size == strategy.copies:  # all ranks see all samples
            return ""
        known = self._run.config.model.sync_buffers
        whole, *alone = single
        drawn, passes = whole.has_drawn, (whole, alone, others)  # in another order
        combinations = self._try(
            lambda: {} if drawn else rows.combinations(model, *passes, self._tolerance)
        )
        ways = {
            name: way or ""
            for name, way in combinations.items()
            if not any(way in (None, known[key]) for key in known if fnmatch.fnmatch(name, key))
        }
        ways = self._own_to_ranks(model, ways)
        ranks, batch = strategy.data_ranks, self._run.config.data.global_batch
        if combinations and not ways and len(strategy.rows(batch)) * ranks != batch:
            self._run.warn(
                f"the {ranks} ranks repeat samples to divide data.global_batch={batch} evenly, and "
                f"forward() changes {listed([*combinations])} by these too, so the result depends "
                f"on the number of ranks; choose a multiple of {ranks}"
            )
        return rows.sentence_of_tensors(ways, {name for name, _ in model.named_buffers()})

    def _own_to_ranks(self, model: nn.Module, ways: dict[str, str]) -> dict[str, str]:
        """Leave out what forward() itself adds up over the ranks, as synchronized codebooks do.

        That is equal on all ranks, whichever of them sees more samples.
        """
        if self._strategy.copies > 1 or self._is_pipeline or not self._world.has_any(bool(ways)):
            return ways
        tensors = [*dict(model.named_parameters()), *dict(model.named_buffers())]
        more, compute = self._more(MORE), partial(self._strategy.plain_pass, model)
        more = more.split(max(2, self._rows_at_once))[0]
        samples = [more if rank == self._world.rank else more.split(1)[0] for rank in range(2)]
        both = self._try(lambda: [self._pass(model, compute, part).changed for part in samples])
        passes = list[list[list[float]]]()
        for changed in both:
            sketches = {name: sketch(tensor.flatten()) for name, tensor in changed.items()}
            values = {n: [part.norm, float(part.sums.sum())] for n, part in sketches.items()}
            passes.append([values.get(name, [0.0, 0.0]) for name in tensors])
        all_values = self._world.gather(torch.tensor(passes))
        spans = (all_values.amax((0, 1)) - all_values.amin((0, 1))).amax(1)
        limits = self._tolerance * all_values.amax((0, 1))[:, 0]
        equal = {n for n, is_equal in zip(tensors, spans <= limits, strict=True) if is_equal}
        return {name: way for name, way in ways.items() if name not in equal}

    def _different_weights(self, loss: float) -> str:
        """Return a problem if the plain models of the ranks differ."""
        losses = self._world.gather(torch.tensor([loss]))
        largest = float(losses.abs().max())
        if not float(losses.max() - losses.min()) > self._tolerance * largest:  # or it is NaN
            return ""
        return (
            f"the ranks built different models, whose losses are {float(losses.min()):.6g} to "
            f"{float(losses.max()):.6g}: draw initial weights only from the generators of torch, "
            "NumPy and Python, without seeding them"
        )

    def _refuse_difference(self, plain: Pass, compute: Callable[..., Pass]) -> None:
        """Refuse the run on every rank if the spread model computes something else.

        Only then, a second pass notes the outputs of its modules too, to name the first.
        """
        spread = compute(names=False)
        difference, module = self._difference(plain, spread), self._first_different(plain, spread)
        if not self._world.has_any(bool(difference) or module is not None):
            return
        self._strategy.model.zero_grad()
        module = self._first_different(plain, compute(names=True))
        if module == "":  # the output of the model itself, although no inner module differs
            difference = difference or "its output differs"
        first = "" if module is None else f", first in the output of {module or 'the model'}"
        problem = difference and (
            f"{self._run.config.parallel.choice} computes something else than one rank would: "
            f"{difference}{first} on rank {self._world.rank}; look for "
            f"{' or '.join(self._strategy.suspicions)}"
        )
        # A rank that can name a module reports first, then the ranks that only see the sums.
        named = self._world.first_problem(problem if module else "")
        self._refuse(named or problem)

    def _difference(self, plain: Pass, spread: Pass) -> str:
        """Return the first difference of loss, norm, a gradient or a weight; empty if none."""
        total = math.sqrt(sum(sketch.norm**2 for sketch in plain.gradients.values()))
        norm, scale = float(self._strategy.clip(None)), total or 1
        weights = dict(self._strategy.model.named_parameters())
        is_short = {name: weight.dtype.itemsize < 4 for name, weight in weights.items()}
        errors = {"its loss": (abs(spread.loss - plain.loss) / (abs(plain.loss) or 1), False)}
        errors["the norm of its gradient"] = abs(norm - total) / scale, True
        for name, mine in spread.gradients.items():
            whole = plain.gradients[name].sums[mine.first : mine.first + len(mine.sums)]
            difference = float((mine.sums - whole).norm())
            errors[f"the gradient of {name}"] = difference / scale, is_short[name]
        for name in plain.changed.keys() & weights.keys():
            mine = sketch(whole_of(spread.changed.get(name, weights[name])))
            theirs = sketch(plain.changed[name])
            error = float((mine.sums - theirs.sums).norm()) / theirs.norm
            errors[f"the weight {name}, which forward() changes,"] = error, is_short[name]
        for quantity, (error, may_round) in errors.items():
            if not error <= (self._of_stored if may_round else self._tolerance):
                return f"{quantity} differs by {error:.1e} of its size"
        return ""

    def _first_different(self, plain: Pass, spread: Pass) -> str | None:
        """Return the module whose call was the first with another output; None if all agree."""
        turns = {
            whole.turn: name
            for name, calls in plain.outputs.items()
            for whole, mine in zip(calls, spread.outputs.get(name, []), strict=False)
            if self._differs(mine, whole)
        }
        return turns[min(turns)] if turns else None

    def _differs(self, mine: Sketch, whole: Sketch) -> bool:
        errors = [float((mine.sums - piece).norm()) for piece in self._pieces(mine, whole)]
        return bool(errors) and not min(errors) <= self._tolerance * whole.norm

    def _pieces(self, mine: Sketch, whole: Sketch) -> Iterator[torch.Tensor]:
        """Yield the pieces of a whole output that this rank may hold; none if that is unknown."""
        if mine.shape == whole.shape:
            yield whole.sums
        elif len(mine.shape) == len(whole.shape) and mine.shape[-1] == whole.shape[-1]:
            sizes = enumerate(zip(mine.shape, whole.shape, strict=True))
            cut = [axis for axis, (part, full) in sizes if part != full]
            for count, index in self._strategy.pieces if len(cut) == 1 else ():
                if mine.shape[cut[0]] * count == whole.shape[cut[0]]:
                    yield whole.sums.chunk(count, cut[0])[index]

    def _disagreement(self, plain: Pass, spread: Pass) -> str:
        """Return a problem if ranks of a tensor group differ in a number that all compute."""
        strategy = self._strategy
        # A pipeline calls its stages with other inputs too, to learn shapes.
        shared = {
            f"the output of {name or 'the model'}": mine
            for name, calls in (() if self._is_pipeline else spread.outputs.items())
            for mine, whole in zip(calls, plain.outputs.get(name, []), strict=False)
            if mine.shape == whole.shape
        }
        weights = dict(strategy.model.named_parameters())
        for name, mine in spread.gradients.items():
            if "tensor" in strategy.alike(weights[name], is_buffer=False):
                shared[f"the gradient of {name}"] = mine
        if not shared:
            return ""
        values = torch.stack([sketch(mine.sums.flatten()).sums for mine in shared.values()])
        others = strategy.among_copies(values)
        spans = others.amax(0) - others.amin(0)
        for quantity, span, mine in zip(shared, spans.tolist(), shared.values(), strict=True):
            if not span <= self._tolerance * mine.norm * math.sqrt(mine.sums.numel()):
                return (
                    f"{self._run.config.parallel.choice}: {quantity} differs between the ranks of "
                    "a tensor group, which all compute it: do not seed generators in the model, "
                    "and keep dropout either between a columns and a rows layer or outside such "
                    "pairs"
                )
        return ""


def _digest(run: Run) -> str:
    """Return a digest of everything that the comparison depends on."""
    config, world = run.config, run.world
    train, data = config.train, config.data
    facts: list[Any] = [config.model.model_dump(), config.parallel.model_dump()]
    facts += [train.loss, train.loss_args, train.gather, data.name, data.args, data.collate]
    facts += [data.micro_batch is None, world.world_size, world.place.local_world_size]
    facts += [crosscheck.code()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
