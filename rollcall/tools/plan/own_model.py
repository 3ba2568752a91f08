"""Describe a model of the user's for the planner: one forward pass on the meta device."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from rollcall.config import Config, ConfigError
from rollcall.tools.plan.model import Model, Part, Product, attention_flops, transformer
from rollcall.tools.plan.step_time import PASSES
from rollcall.train import models
from rollcall.train.data import sets
from rollcall.train.data.order import Order, training_batches
from rollcall.train.data.source import Batch, Source
from rollcall.train.numerics.losses import outputs_of
from rollcall.train.parallel.shard import units
from rollcall.train.ranks.world import Place, World
from rollcall.train.torch_private import TorchDispatchMode, storage_key, tree_leaves

aten = torch.ops.aten
HALF = 0.5
"""Bytes in 16 bits for each byte of the traced pass, which is in fp32."""
PASSES_OF_STEP = 3
"""Bytes that forward and backward passes move for each byte of the forward pass."""


def describe(config: Config) -> Model:
    """Return the model of a configuration; ConfigError if it cannot run on the meta device."""
    world = World(Place("plan", world_size=1, local_world_size=1), torch.device("cpu"))
    source = sets.load(config.data, world, config.seed)
    if config.model.name in ("gpt", "llama"):
        return _gpt(config, source)
    order = Order.of_run(config, source)
    example = next(training_batches(source, order, range(1), range(order.steps)))
    with torch.device("meta"):
        model = models.build(config.model, source)
    return traced(model, example, config.model.name)


def _gpt(config: Config, source: Source) -> Model:
    made = config.model
    ffn = made.ffn_size or 4 * made.hidden_size
    size = made.expert_size or ffn
    experts = {"experts": made.experts, "top_k": made.top_k, "expert_ffn": size}
    model = transformer(
        made.name,
        **{"layers": made.num_layers, "hidden": made.hidden_size, "heads": made.num_heads},
        **{"kv_heads": made.num_kv_heads, "ffn": ffn, "vocab": source.classes},
        **{"length": source.shape[0], "gated": made.name == "llama", "tied": made.tied},
        **{**experts, "shared_ffn": made.shared_experts * size, "dense_layers": made.dense_layers},
    )
    layer = model.layer
    # torch counts the whole square of causal attention, and 2.5 times as much in backward passes.
    masked = model.layers * attention_flops(layer.attention) if layer.attention else 0
    flops = model.flops() + (3.5 * 2 - 3) * masked
    return dataclasses.replace(model, layer=layer, exact_flops=flops)


def traced(model: nn.Module, example: Batch, name: str) -> Model:
    """Describe a model on the meta device by a pass of an example, two rows at least.

    The members of its largest container of modules are the layers; unequal ones are averaged.

    Raises:
        ConfigError: the model cannot run on the meta device.
    """
    example = Batch.joined([example, example]) if len(example.weights) < 2 else example
    rows = len(example.weights)
    meta = example.to(torch.device("meta"))
    layers = _layers(model)
    tracer = _Tracer(model, layers)
    try:
        with FlopCounterMode(display=False) as flops, tracer:
            outputs = outputs_of(model, meta)
            tensors = [output for output in tree_leaves(outputs) if torch.is_tensor(output)]
            total = sum(output.float().sum() for output in tensors if output.is_floating_point())
            tracer.stop()
            total.backward()  # type: ignore[union-attr]
    except (NotImplementedError, RuntimeError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"model.name={name} cannot be planned: it does not run on torch's meta device, as most "
            f"mixtures of experts, whose shapes depend on values: {reason}"
        ) from None
    first, layer, last = (tracer.part(x, len(layers), rows) for x in ("first", "layer", "last"))
    mean = layer.weights * max(1, len(layers))  # of unequal layers, rounded
    rest = sum(weight.numel() for weight in model.parameters()) - first.weights - mean
    last = dataclasses.replace(last, weights=rest)
    exact = flops.get_total_flops() / rows
    return Model(name, first, layer, max(1, len(layers)), last, exact_flops=exact)


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the members of the largest container of at least two modules of one class."""
    containers: list[list[nn.Module]] = []
    for module in model.modules():
        if isinstance(module, nn.Sequential | nn.ModuleList):
            children = [child for child in module if any(True for _ in child.parameters())]
            if len(children) > 1 and len({type(child) for child in children}) == 1:
                containers.append(children)
    by_weights = {
        sum(weight.numel() for child in children for weight in child.parameters()): children
        for children in containers
    }
    return by_weights[max(by_weights)] if by_weights else list(units(model))


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records products, bytes and kept activations before, in and after the layers."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._place, self._runs = "first", True
        self._products: dict[str, Counter[Product]] = {}
        self._moved: Counter[str] = Counter()
        self._saved: Counter[str] = Counter()
        self._weights: Counter[str] = Counter()
        self._boundary = 0
        inside = {id(weight) for layer in layers for weight in layer.parameters()}
        self._parameters = {id(weight) for weight in model.parameters()}
        passed = False
        for weight in model.parameters():
            passed = passed or id(weight) in inside
            part = "layer" if id(weight) in inside else "last" if passed else "first"
            self._weights[part] += weight.numel()
        self._left = len(layers)
        self._hooks = [layer.register_forward_pre_hook(self._enter) for layer in layers]
        self._hooks += [layer.register_forward_hook(self._leave) for layer in layers]
        self._kept: dict[int, torch.Tensor] = {}  # by storage; held, so no address is used twice
        self._saving = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> Any:
        self._saving.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def stop(self) -> None:
        """End the recording before the backward pass."""
        self._runs = False
        self._saving.__exit__(None, None, None)

    def _enter(self, *_: Any) -> None:
        self._place = "layer"

    def _leave(self, module: nn.Module, inputs: Any, outputs: Any) -> None:  # noqa: ARG002
        self._left -= 1
        self._place = "layer" if self._left else "last"
        tensors = [tensor for tensor in tree_leaves(outputs) if torch.is_tensor(tensor)]
        self._boundary = max(self._boundary, sum(tensor.nbytes for tensor in tensors))

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = storage_key(tensor)
        if self._runs and id(tensor) not in self._parameters and key not in self._kept:
            self._kept[key] = tensor
            self._saved[self._place] += tensor.untyped_storage().nbytes()
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._runs or func.is_view:
            return out
        if products := _products(func.overloadpacket, args, out):
            self._products.setdefault(self._place, Counter()).update(products)
        else:
            tensors = [tensor for tensor in tree_leaves((args, out)) if torch.is_tensor(tensor)]
            self._moved[self._place] += sum(tensor.nbytes for tensor in tensors)
        return out

    def part(self, name: str, layers: int, rows: int) -> Part:
        """Return the recorded numbers, per sample and layer, in 16 bits."""
        count = max(1, layers) if name == "layer" else 1
        share = rows * count
        products = self._products.get(name, Counter())
        return Part(
            weights=round(self._weights[name] * rows / share),
            products=tuple(
                Product(rows_ * count / share, inner, columns)
                for (rows_, inner, columns, *_), count in products.items()
            ),
            moved=PASSES_OF_STEP * HALF * self._moved[name] / share / PASSES,
            saved=HALF * self._saved[name] / share,
            boundary=HALF * self._boundary / rows if name == "layer" else 0.0,
        )


def _products(kind: Any, args: Any, out: Any) -> list[Product]:
    """Return the matrix products of an operation; attention is two for each head."""
    if kind in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):
        left, right = [arg for arg in args if torch.is_tensor(arg)][-2:]
        return [Product(math.prod(left.shape[:-1]), left.shape[-1], right.shape[-1])]
    if kind is aten.convolution:
        weight = args[1]
        rows = out.numel() // out.shape[1]
        return [Product(rows, math.prod(weight.shape[1:]), weight.shape[0])]
    if "scaled_dot_product" in str(kind) and "backward" not in str(kind):
        query, key = args[:2]
        rows, width, length = math.prod(query.shape[:-1]), query.shape[-1], key.shape[-2]
        return [Product(rows, width, length), Product(rows, length, width)]
    return []
