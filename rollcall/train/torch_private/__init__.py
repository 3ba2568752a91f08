"""Everything of torch that has no public name and that rollcall uses, in one place.

A test refuses a private name of torch in any other file, and another test calls each entry with the
torch that is installed. Unless an entry says more, torch 2.11 and 2.15 have what it uses, and an
import or a run fails with the missing name in a torch that has not.
"""

import gc
import importlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._subclasses.schema_check_mode  # which `without_modes` imports late
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict as unflatten_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # has tutorials

# Nested tuples, lists and dictionaries, as torch.func sees them.
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

BatchNorm = nn.modules.batchnorm._BatchNorm
"""The class of BatchNorm for any number of dimensions."""
COMPILER = "torch._dynamo"
"""The module that the first optimizer imports, in seconds: a parent does it once for all ranks."""
REGISTRIES = {"_parameters", "_buffers", "_modules"}
"""Attributes of a module that hold its tensors and modules. Without them, a check sees too much."""
READ_NUMBER = torch.ops.aten._local_scalar_dense.default
"""The operation of `Tensor.item`."""
COSTLY = {
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
"""Products of matrices and attention. Of an operation with another name, the result is recomputed
in the backward pass."""
without_modes = torch.utils._python_dispatch._disable_current_modes
"""Returns a context in which operations do not pass through a TorchDispatchMode."""
norms = torch._foreach_norm
"""Returns the norm of each tensor, of one device and type; `get_total_norm` takes ten times as long
to group a few small tensors."""
PROFILER = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)
"""Operations of `torch.profiler.record_function`."""
copy_all = torch._foreach_copy_
"""Copies to each tensor of a list in a few kernels."""
scaled_mm = torch._scaled_mm
"""Multiplies matrices in 8 bits; the public function has no CPU kernel in 2.11."""
MESSAGES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")
"""Namespaces of the operations that return what other ranks send. Those of "c10d" write to a given
tensor instead, so a recomputed block must repeat them."""


def all_to_all(
    x: torch.Tensor, received: list[int] | None, sent: list[int] | None, group: dist.ProcessGroup
) -> torch.Tensor:
    """Exchange rows with the ranks of a group, `sent` to each and `received` of each; None: equal.

    Gradients travel back. Recomputed blocks keep the result, and do not exchange again.
    """
    return functional_collectives.all_to_all_single_autograd(x, received, sent, group)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Replace an attribute of torch while the context is open; yield the original."""
    original, is_own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, value)
    try:
        yield original
    finally:
        if is_own:
            setattr(owner, name, original)
        else:  # it was inherited
            delattr(owner, name)


@contextmanager
def waits_replaced(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Wrap the functions in which a thread waits for other ranks, while the context is open."""
    with ExitStack() as stack:
        for owner, name in ((dist.Work, "wait"), (functional_collectives, "wait_tensor")):
            stack.enter_context(replaced(owner, name, wrap(getattr(owner, name))))
        yield


@contextmanager
def values_promised(trunc_normal: Callable[..., torch.Tensor]) -> Iterator[Callable[..., Any]]:
    """Replace `nn.init.trunc_normal_`, and let no tensor say that it is on the meta device.

    The public function draws again until all numbers fit, and like other initializers does nothing
    on the meta device. Code may have imported it by name, so what it calls is replaced. Yield the
    original.
    """
    with (
        replaced(torch.Tensor, "is_meta", property(lambda _: False)),
        replaced(nn.init, "_no_grad_trunc_normal_", trunc_normal) as original,
    ):
        yield original


def muon_replaced(
    wrap: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]],
) -> Any:
    """Return a context in which Muon orthogonalizes by another function; or AttributeError."""
    from torch.optim import _muon

    name = "_zeropower_via_newtonschulz"
    return replaced(_muon, name, wrap(getattr(_muon, name)))


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors share if they share memory, also on the meta device."""
    return int(tensor.untyped_storage()._cdata)


def is_backward() -> bool:
    """Return True if a backward pass calls this code."""
    return bool(torch._C._current_graph_task_id() != -1)


def arguments_of(operation: Any) -> Sequence[Any]:
    """Return the arguments of an ATen operation, with what it writes to; none if higher-order."""
    schema = getattr(operation, "_schema", None)
    arguments: Sequence[Any] = schema.arguments if schema else ()
    return arguments


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return True if a hook waits for the gradient of a tensor."""
    waiting: Any = tensor
    return bool(waiting._backward_hooks or waiting._post_accumulate_grad_hooks)


def is_view(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is a view, which cannot be detached in place."""
    return tensor._is_view()


def is_mapped(tensor: torch.Tensor) -> bool:
    """Return True for a tensor within torch.func.vmap or grad, which has no numbers to read."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return tensor._version


def temporary_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that no checkpoint holds."""
    return module._non_persistent_buffers_set


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dictionary in which a module keeps its own buffers."""
    return module._buffers


def put(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor into the place of a parameter or buffer; `setattr` may be the user's own."""
    registry: Any = module._parameters if name in module._parameters else module._buffers
    registry[name] = tensor


def with_child(module: nn.Module, name: str, child: nn.Module) -> nn.Module:
    """Return a module with the tensors and children of another, and one child more."""
    joined = nn.Module()
    joined._parameters, joined._buffers = module._parameters, module._buffers
    joined._non_persistent_buffers_set = module._non_persistent_buffers_set
    joined._modules = {**module._modules, name: child}
    return joined


def ignore_in_ddp(module: nn.Module, names: set[str]) -> None:
    """Let DDP, which wraps the module later, leave these buffers and parameters alone."""
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(module, names)


def reduce_unused(unit: Any, uses: defaultdict[torch.Tensor, bool]) -> None:
    """Let a unit of FSDP2 add up zeros for weights without a gradient; `uses` notes which have one.

    So ranks that use different weights of a unit send messages of one size: with other sizes, gloo
    ends the process. It does nothing before torch 2.14.
    """
    if not hasattr(unit, "set_reduce_scatter_unused_params"):
        return
    unit.set_reduce_scatter_unused_params(True, recurse=False)

    def noted(group: Any, reduce: Callable[[], None]) -> None:
        for weight in group.fsdp_params:
            gathered = getattr(weight, "_unsharded_param", weight.sharded_param)
            gradients = gathered.grad, weight.unsharded_accumulated_grad
            uses[weight.sharded_param] |= gradients[0] is not None or gradients[1] is not None
        reduce()

    for group in unit._get_fsdp_state()._fsdp_param_groups:
        group.post_backward = partial(noted, group, group.post_backward)


def expect_gradients(ddp: DistributedDataParallel, used: Sequence[torch.Tensor]) -> None:
    """Let DDP expect the gradients of a backward pass that no forward pass has announced.

    Its search for unused weights takes those for used on which the tensors `used` depend.
    """
    ddp.reducer.prepare_for_backward(list(used))


def collectives_started() -> dict[str, int]:
    """Count the collectives started in each process group, from torch's flight recorder.

    The "fr" one is gloo's. A torch without one returns nothing.
    """
    started = {}
    for backend in ("fr", "nccl"):
        dump = getattr(torch._C._distributed_c10d, f"_dump_{backend}_trace_json", None)
        status = json.loads(dump(False, False)).get("pg_status", {}) if dump else {}
        for name, group in status.items():
            started[f"{backend} {name}"] = int(group["last_enqueued_collective"])
    return started


def set_timeout(timeout: timedelta) -> None:
    """Let the collectives of all groups fail after this time; public since torch 2.15.

    The groups of a mesh begin with the default, 10 minutes with NCCL.
    """
    function = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in [*distributed_c10d._world.pg_map]:
        function(timeout, group)


def abort() -> None:
    """Close all process groups without a word to other ranks; what waits in them fails."""
    distributed_c10d._abort_process_group()
    gc.collect()  # gloo closes its connections with the last reference to a group


def record_memory(is_on: bool) -> None:
    """Begin or end the history of the GPU's allocator."""
    torch.cuda.memory._record_memory_history(enabled="all" if is_on else None, max_entries=100_000)


def dump_memory(path: Path) -> None:
    """Write a snapshot of the GPU's allocator, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def fake_store() -> dist.Store:
    """Return the store of an imaginary world, as tests of torch do, for `rollcall plan` alone."""
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    return fake.FakeStore()  # type: ignore[no-any-return]
