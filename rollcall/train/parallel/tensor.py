"""Tensor parallelism: split a linear layer by columns, the next by rows, and sum after the pair.

Megatron-LM, https://arxiv.org/abs/1909.08053. A model declares its layers in `tensor_plan`. All
other modules compute the same on every rank of the dimension, so their dropout draws the same masks
there. Between a columns and a rows layer each rank draws random numbers for its own units. An
embedding and the head may divide the vocabulary. A loss of rollcall's then computes with each
rank's part of the logits; for other losses, and in an evaluation, they are gathered.

With sequence parallelism, https://arxiv.org/abs/2205.05198, each rank computes the modules between
the pairs, such as norms, for its own piece of every sequence, with its own random numbers. The
sum is then split in two: a reduce-scatter after rows and an all-gather before columns.
"""

import fnmatch
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from rollcall.config import Config, ConfigError
from rollcall.train.data.source import Batch
from rollcall.train.numerics.randomness import Fork
from rollcall.train.parallel.part import Part, nearest_multiples, one_input
from rollcall.train.ranks.device import whole_of
from rollcall.train.torch_private import tree_map_only, version
from rollcall.train.torch_private.overrides import FirstInput
from rollcall.train.weights.deferred import tensors_of

COLUMNS, ROWS, VOCABULARY = "columns", "rows", "vocabulary"
SCATTER, GATHER, SHARE = "scatter", "gather", "gather for columns"
PIECE = Shard(1)
"""The layout of pieces of sequences: (rows, length, hidden), cut along the length."""
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    COLUMNS: parallel.ColwiseParallel,
    ROWS: parallel.RowwiseParallel,
    SHARE: lambda: FirstInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
}
SEQUENCE_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    COLUMNS: parallel.ColwiseParallel,
    ROWS: lambda: parallel.RowwiseParallel(output_layouts=PIECE),
    # The input of these columns comes in pieces; no module before it gathers them.
    "columns of pieces": lambda: parallel.ColwiseParallel(input_layouts=PIECE),
    "of pieces": lambda: parallel.SequenceParallel(use_local_output=True),
    SCATTER: lambda: parallel.PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=PIECE
    ),
    GATHER: lambda: parallel.PrepareModuleInput(
        input_layouts=PIECE, desired_input_layouts=Replicate(), use_local_output=True
    ),
    # Each rank computes all of the sequence, and keeps its piece.
    "whole": lambda: parallel.PrepareModuleInputOutput(
        input_layouts=PIECE,
        desired_input_layouts=Replicate(),
        use_local_input=True,
        output_layouts=Replicate(),
        desired_output_layouts=PIECE,
    ),
    # One all-gather for several columns; their gradients are added before they are scattered.
    SHARE: lambda: FirstInput(input_layouts=PIECE, desired_input_layouts=Replicate()),
}


class Tensor(Part):
    """The layers of the model's plan, split over the ranks of one dimension."""

    suspicion = "columns layers in tensor_plan whose outputs do not go to a rows layer unit by unit"

    keeps_logits = False  # divided, since the last layer computes the loss with a part of them

    def __init__(self, mesh: DeviceMesh, config: Config, pieces: int) -> None:
        self._mesh = mesh
        self._model = config.model
        self._sequence, self._compiles = config.parallel.sequence_parallel, config.train.compile
        self._input: tuple[Any, ...] = ()  # of columns: the newest one, its version, its DTensor
        self._pieces = pieces  # the degree of context parallelism, which also divides sequences
        self._plan: Any = {}  # names of layers, with * as a wildcard, each with columns or rows
        self._sequence_plan: Any = {}  # changes of the plan for sequence parallelism, if supported

    def check(self, model: nn.Module, example: Batch) -> None:
        """Take the model's plan; widths, heads and sequences must divide."""
        degree = self._mesh.size()
        self._plan = getattr(model, "tensor_plan", None)
        self._sequence_plan = getattr(model, "sequence_plan", {})
        if self._plan is None:
            raise ConfigError(
                f"model.name={self._model.name} has no plan for tensor parallelism: give the "
                "model an attribute tensor_plan, or choose a model that has one, such as gpt"
            )
        divides: Any = getattr(model, "tensor_divides", ())
        if not isinstance(divides, Mapping):
            divides = {key: getattr(self._model, key) for key in divides}
        for key, number in divides.items():
            if number % degree:
                raise ConfigError(
                    f"model.{key}={number} does not divide by tensor={degree}; "
                    f"choose model.{key}={nearest_multiples(number, degree)}"
                )
        self._check_layers(model, degree)
        if self._sequence:
            self._check_sequence(example, degree)

    def _check_layers(self, model: nn.Module, degree: int) -> None:
        matches = _matches(model, self._plan)
        for pattern, cut in self._plan.items():
            known = COLUMNS, ROWS, VOCABULARY
            problem = "" if cut in known else f"expected {' or '.join(known)}"
            if not any(fnmatch.fnmatch(name, pattern) for name, *_ in matches):
                problem = "the model has no such layer"
            if problem:
                raise ConfigError(f"tensor_plan has {pattern}: {cut}, but {problem}")
        for name, cut, layer in matches:
            kinds: Any = (nn.Linear, nn.Embedding) if cut == VOCABULARY else (nn.Linear,)
            if not isinstance(layer, kinds):
                names = " or ".join(f"nn.{kind.__name__}" for kind in kinds)
                raise ConfigError(
                    f"tensor_plan: expected {name} to be an {names}, got a {type(layer).__name__}"
                )
            if cut == VOCABULARY:
                width = len(layer.weight)
                if width <= -(-width // degree) * (degree - 1):  # torch gives the last ranks less
                    raise ConfigError(
                        f"layer {name} has a vocabulary of {width}, too small for tensor={degree}: "
                        "a rank would have none of it; choose a smaller degree"
                    )
                continue
            width = layer.out_features if cut == COLUMNS else layer.in_features
            if width % degree:
                raise ConfigError(
                    f"layer {name} has {width} {cut}, which do not divide by tensor={degree}; "
                    f"choose {nearest_multiples(width, degree)}"
                )

    def _check_sequence(self, example: Batch, degree: int) -> None:
        if not self._sequence_plan:
            raise ConfigError(
                f"model.name={self._model.name} has no plan for parallel.sequence_parallel=true: "
                "give the model an attribute sequence_plan, choose model.name=gpt, or remove it"
            )
        length = one_input(example, "parallel.sequence_parallel=true").shape[1]
        if length % (degree * self._pieces):
            by = f"tensor={degree}" + f" times context={self._pieces}" * (self._pieces > 1)
            raise ConfigError(
                f"data.seq_len={length} does not divide by {by}, as "
                "parallel.sequence_parallel=true needs; choose "
                f"{nearest_multiples(length, degree * self._pieces)}"
            )

    def apply(self, model: nn.Module) -> None:
        """Split the layers in place."""
        # A split layer returns a view, and FSDP2 around it warns of in-place writes (torch 2.15);
        # models with a plan do not write in place there.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        changes, styles = self._sequence_plan, SEQUENCE_STYLES
        if not self._sequence:  # modules still give one input to several columns, but gather none
            changes = {name: cut for name, cut in changes.items() if cut == SHARE}
            styles = STYLES
        divided = {name for name, cut, _ in _matches(model, self._plan) if cut == VOCABULARY}
        found, cuts = {}, _matches(model, {**self._plan, **changes})
        shares = {name for name, cut, _ in cuts if cut == SHARE}
        columns = Counter(name.rpartition(".")[0] for name, cut, _ in cuts if cut == COLUMNS)
        for name, cut, layer in cuts:
            found[name] = self._vocabulary(layer) if name in divided else styles[cut]()
            parent = name.rpartition(".")[0]
            if cut == COLUMNS and columns[parent] > 1 and parent not in shares:
                layer.register_forward_pre_hook(self._share_input)
        weights = [places for places, one in tensors_of(model) if isinstance(one, nn.Parameter)]
        parallel.parallelize_module(model, self._mesh, found)
        for layer in map(model.get_submodule, divided if self._compiles else ()):
            if isinstance(layer, nn.Embedding):
                # Compiled code loses the gradient of a sum that is still under way (torch 2.14).
                layer.register_forward_hook(lambda *call: call[2].clone())
        for places in weights:  # each of the places has its own copy now
            _share_again(model, *places)
        self._fork_where_pieces_begin(model)

    def _vocabulary(self, layer: nn.Module) -> ParallelStyle:
        outside = PIECE if self._sequence else Replicate()
        if isinstance(layer, nn.Embedding):
            return parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=outside)
        return parallel.ColwiseParallel(
            input_layouts=outside,
            output_layouts=Shard(-1) if self.keeps_logits else Replicate(),
            use_local_output=not self.keeps_logits,
        )

    def gather(self, outputs: Any) -> Any:
        """Return whole logits."""
        return tree_map_only(DTensor, whole_of, outputs)

    def _fork_where_pieces_begin(self, model: nn.Module) -> None:
        self._fork = Fork(self._mesh.device_type, "tensor", self._mesh.get_local_rank())
        begin, end = COLUMNS, ROWS
        if self._sequence:  # also between the pairs
            begin, end = SCATTER, GATHER
        cuts = _matches(model, self._sequence_plan if self._sequence else self._plan)
        draws = any(isinstance(layer, nn.Dropout) and layer.p for layer in model.modules())
        if vars(type(model)).get("only_dropout_draws", False) and not draws:
            cuts = []  # a fork would break the graph of what is compiled
        self._forks = bool(cuts)
        self._begins = {layer for _, cut, layer in cuts if cut == begin}
        for layer in self._begins:
            layer.register_forward_hook(self._enter)
        for layer in (layer for _, cut, layer in cuts if cut == end):
            layer.register_forward_pre_hook(self._leave)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Fork the random numbers of a pipeline stage whose inputs or outputs are pieces."""
        if self._sequence and self._forks:
            if self._begins.isdisjoint(module.modules()):
                module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)
        return module

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _share_input(self, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """Give columns with one input one DTensor, so that one all-reduce adds up its gradient."""
        x, *others = inputs
        # Sequence parallelism has gathered a DTensor; without a gradient there is nothing to add.
        if isinstance(x, DTensor) or not (x.requires_grad and torch.is_grad_enabled()):
            return inputs
        known = self._input and self._input[0]() is x and self._input[1] == version(x)
        if not known:
            whole = DTensor.from_local(x, self._mesh, [Replicate()], run_check=False)
            self._input = weakref.ref(x), version(x), whole
        return (self._input[2], *others)

    @contextmanager
    def around(self, last: bool) -> Iterator[None]:  # noqa: ARG002
        """Release the input afterwards, and with it the activations of a pass that failed."""
        try:
            yield
        finally:
            self._input = ()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, module: nn.Module, *_: Any) -> None:
        if module.training:
            self._fork.enter()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self, *_: Any) -> None:
        self._fork.leave()

    def finish(self, model: nn.Module) -> None:
        """Sum the gradients of norms, which each rank has for its pieces of the sequences."""
        for parameter in model.parameters():
            gradient = parameter.grad
            if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
                parameter.grad = gradient.redistribute(placements=parameter.placements)


def _share_again(model: nn.Module, first: str, *others: str) -> None:
    weight = model.get_parameter(first)
    for place in others:
        other = model.get_parameter(place)
        if getattr(other, "placements", None) != getattr(weight, "placements", None):
            raise ConfigError(
                f"{first} and {place} are one weight, but the plans for tensor and sequence "
                "parallelism split them differently: split both in the same way, or neither"
            )
        module, _, leaf = place.rpartition(".")
        setattr(model.get_submodule(module), leaf, weight)


def _matches(model: nn.Module, plan: Mapping[str, str]) -> list[tuple[str, str, Any]]:
    """Return the layers in a plan, without the layers of other pipeline stages."""
    return [
        (name, cut, layer)
        for name, layer in model.named_modules()
        for pattern, cut in plan.items()
        if fnmatch.fnmatch(name, pattern) and not isinstance(layer, nn.Identity)
    ]
