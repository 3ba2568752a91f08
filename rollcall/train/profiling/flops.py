"""Count the floating-point operations of a step, and compare them with the chip's peak."""

import copy
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rollcall.config import chips
from rollcall.train.data.source import Batch
from rollcall.train.numerics.losses import Loss, outputs_of
from rollcall.train.numerics.model_loss import ModelLoss
from rollcall.train.ranks.device import chip_name
from rollcall.train.ranks.run import Run
from rollcall.train.torch_private import READ_NUMBER, TorchDispatchMode, tree_leaves

META = torch.device("meta")
MOST_READS = 5_000
"""Numbers that a model may read: `while error > tolerance` would never end without values."""
_newest: dict[str, list["Operations"]] = {}
"""Of one sample and two, by the configuration: ranks build the model again if one is lost."""


class Operations(NamedTuple):
    """Floating-point operations; a multiplication and an addition are two."""

    forward: int
    backward: int
    recomputed: int  # of forward passes that activation checkpointing repeats


def factors(
    run: Run, model: nn.Module, example: Batch, loss: Loss, passes: int
) -> tuple[dict[str, float], str]:
    """Return factors from samples per second to other figures, and a warning if one is missing.

    The figures: `tokens_per_second` for sequences of one length; the model's own `flops_per_second`
    on all ranks; `recomputed_flops_per_second`, if any; and `mfu`, the share of the chip's peak
    that its own take (Chowdhery et al., PaLM, appendix B, https://arxiv.org/abs/2204.02311). Only
    rank 0 counts, before the model is spread. Operations that do not grow with samples happen in
    each of the `passes` of a step on all ranks. Raise ConfigError if `log.chips` cannot be read.
    """
    config, world = run.config, run.world
    figures = {}
    ids = [leaf for leaf in tree_leaves(example.inputs) if isinstance(leaf, torch.Tensor)][:1]
    if ids and ids[0].ndim == 2 and not ids[0].is_floating_point() and config.data.pad is not True:
        figures["tokens_per_second"] = float(ids[0].shape[1])
    peak = peak_of(chip_name(world.device), config.precision, config.log.chips)
    if not world.is_main:
        return figures, ""
    if loss.turns:
        return figures, "flops_per_second is not logged: a step trains one of several networks"
    try:
        if (key := config.model_dump_json()) not in _newest:
            both = example, Batch.joined([example, example])
            _newest[key] = [operations_of(model, batch, loss) for batch in both]
        count, share = len(example.weights), passes / config.data.global_batch
        of_model, recomputed = _per_sample(_newest[key], count, share)
    except Exception as error:  # the model's code may raise anything
        text = str(error).strip().partition("\n")[0] or type(error).__name__
        return figures, f"flops_per_second is not logged: it cannot compute without values: {text}"
    if of_model:
        figures["flops_per_second"] = of_model
    if recomputed:
        figures["recomputed_flops_per_second"] = recomputed
    if of_model and peak:
        figures["mfu"] = of_model / peak / world.world_size
    return figures, ""


def _per_sample(counted: list[Operations], count: int, passes: float) -> tuple[float, float]:
    """Return the operations for a sample: of the model, and recomputed.

    The difference of two numbers of samples shows what a pass costs anyway, such as an orthogonal
    parametrization of the weights.
    """
    forward, backward, again = (
        (more - some) / count + (2 * some - more) * passes
        for some, more in zip(*counted, strict=True)
    )
    return forward + backward, again


def operations_of(model: nn.Module, example: Batch, loss: Loss | None = None) -> Operations:
    """Return the operations of a forward and a backward pass over these samples.

    They are counted on a copy of the model without values, so nothing is computed, and the model's
    own state does not change. Attention is counted as the plain formula. Where the code reads a
    number, it gets 1 or True, such as for a mask that hides nothing.
    """
    batch, counter = example.to(META), FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter, PassCounter(counter) as passes:
        bare = without_values(model)
        if loss and loss.takes_model and not isinstance(loss.function, ModelLoss):
            outputs = without_values(loss.function)(model=bare, batch=batch.inputs)
        else:
            outputs = outputs_of(bare, batch)
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        tensors = [tensor for tensor in tensors if tensor.requires_grad]
        passes.is_backward = True
        if tensors:
            torch.autograd.backward(tensors, [*map(torch.ones_like, tensors)])
    return Operations(*passes.counts)


def without_values(code: Any) -> Any:
    """Return a copy of a module or a loss with its tensors on the meta device."""
    memo: dict[int, Any] = {}
    if isinstance(code, nn.Module):
        memo = {id(buffer): buffer.to(META) for buffer in code.buffers()}
        for weight in code.parameters():
            memo[id(weight)] = nn.Parameter(weight.detach().to(META), weight.requires_grad)
    return copy.deepcopy(code, memo)


class PassCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Divides torch's count among the passes; only recomputation has gradients enabled."""

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter
        self.counts = [0, 0, 0]  # as in `Operations`
        self._reads = 0
        self.watched, self.are_used = list[Any](), False  # tensors, and whether code uses them
        self.is_backward = False  # set between the two passes

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READ_NUMBER:
            self._reads += 1
            if self._reads > MOST_READS:
                raise RuntimeError(f"it reads more than {MOST_READS} numbers, perhaps in a loop")
            return True if args[0].dtype == torch.bool else 1
        self.are_used |= any(x is y for x in self.watched for y in tree_leaves([args, kwargs]))
        before = self._counter.get_total_flops()
        result = func(*args, **(kwargs or {}))
        kind = 0 if not self.is_backward else 2 if torch.is_grad_enabled() else 1
        self.counts[kind] += self._counter.get_total_flops() - before
        return result


def peak_of(chip: str, precision: str, more: str | None = None) -> float | None:
    """Return a chip's dense operations per second, None if unknown; `more` adds to chips.yaml."""
    table = chips.known(more)
    name = chips.find(chip, table)
    return table[name].get(precision) if name else None
