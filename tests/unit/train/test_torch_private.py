"""Each private name of torch that rollcall uses, with the torch that is installed.

`ROLLCALL_TORCH=2.11.0 ./env/run pytest tests/unit/train/test_torch_private.py` tries the oldest.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import _muon

import rollcall.train
from rollcall.train import main, torch_private
from rollcall.train.torch_private import overrides


@pytest.fixture
def world() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def patched() -> list[Any]:
    """All functions of torch that rollcall replaces at some time."""
    return [
        dist.Work.wait,
        functional_collectives.wait_tensor,
        torch.Tensor.is_meta,
        nn.init._no_grad_trunc_normal_,
        _muon._zeropower_via_newtonschulz,
        functional.scaled_dot_product_attention,
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["digits", "optim.name=muon"],
        pytest.param(["gpt", "data.seq_len=16"], marks=pytest.mark.long),
    ],
)
def test_after_a_training_the_functions_of_torch_are_the_originals(
    words: list[str], tmp_path: Path
) -> None:
    before = patched()
    words = [*words, "train.steps=2", "data.global_batch=8", "device=cpu", f"run.root={tmp_path}"]
    assert main.main(words) == 0
    assert patched() == before
    assert "is_meta" not in vars(torch.Tensor)


def test_what_was_replaced_comes_back_after_an_exception() -> None:
    before = patched()

    def wrap(function: Any) -> Any:
        return wraps(function)(lambda *args: function(*args))

    contexts: list[Any] = [
        lambda: torch_private.waits_replaced(wrap),
        lambda: torch_private.values_promised(lambda tensor, *_: tensor),
        lambda: torch_private.muon_replaced(wrap),
    ]
    for context in contexts:
        with pytest.raises(KeyError), context():
            assert patched() != before
            raise KeyError
        assert patched() == before
    assert "is_meta" not in vars(torch.Tensor)


def test_an_initializer_calls_what_replaces_it() -> None:
    weight, seen = torch.empty(4, device="meta"), []

    def note(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    with torch_private.values_promised(note):
        assert not weight.is_meta
        nn.init.trunc_normal_(weight)
    assert len(seen) == 1 and seen[0] is weight and weight.is_meta


def test_muon_calls_what_replaces_its_function() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    calls = []

    def wrap(original: Any) -> Any:
        def noted(*args: Any) -> Any:
            calls.append(args)
            return original(*args)

        return noted

    optimizer: Any = torch.optim.Muon([weight])
    with torch_private.muon_replaced(wrap):
        optimizer.step()
    assert len(calls) == 1


def test_waiting_for_other_ranks_calls_what_replaces_it(world: None) -> None:  # noqa: ARG001
    calls: list[str] = []

    def wrap(function: Any) -> Any:
        def noted(*args: Any) -> Any:
            calls.append(function.__name__)
            return function(*args)

        return noted

    with torch_private.waits_replaced(wrap):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        work.wait()
        functions: Any = functional_collectives
        functions.wait_tensor(functions.all_reduce(torch.ones(1), "sum", dist.group.WORLD))
    assert "wait" in calls and "wait_tensor" in calls


def test_tensors_that_share_memory_have_the_same_key() -> None:
    for device in ("cpu", "meta"):
        whole, other = torch.empty(4, device=device), torch.empty(4, device=device)
        assert torch_private.storage_key(whole) == torch_private.storage_key(whole[1:])
        assert torch_private.storage_key(whole) != torch_private.storage_key(other)


def test_an_operation_says_what_it_writes_to() -> None:
    arguments = torch_private.arguments_of(torch.ops.aten.fill_.Scalar)
    assert [one.name for one in arguments] == ["self", "value"]
    writes = [one.alias_info is not None and one.alias_info.is_write for one in arguments]
    assert writes == [True, False]


def test_a_number_is_read_by_the_operation_of_that_name() -> None:
    seen = []

    class Watch(torch_private.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():  # type: ignore[no-untyped-call]
        torch.ones(()).item()
        x = torch.ones(1, 1, 2, 2)
        functional.scaled_dot_product_attention(x, x, x)
    assert torch_private.READ_NUMBER in seen
    assert torch_private.COSTLY & {*seen}


def test_hooks_views_and_changes_are_seen() -> None:
    weight: Any = nn.Parameter(torch.ones(2))
    assert not torch_private.has_hooks(weight)
    weight.register_post_accumulate_grad_hook(lambda _: None)
    assert torch_private.has_hooks(weight)
    other: Any = nn.Parameter(torch.ones(2))
    other.register_hook(lambda gradient: gradient)
    assert torch_private.has_hooks(other)
    x = torch.ones(2)
    assert torch_private.is_view(x[:1]) and not torch_private.is_view(x.clone())
    assert torch.func.vmap(lambda row: row * torch_private.is_mapped(row))(x).all()
    assert not torch_private.is_mapped(x)
    seen: list[bool] = []
    leaf = x.clone().requires_grad_()
    leaf.register_hook(lambda _: seen.append(torch_private.is_backward()))  # type: ignore[no-untyped-call]
    leaf.sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [True] and not torch_private.is_backward()
    before = torch_private.version(x)
    x.add_(1)
    assert torch_private.version(x) == before + 1


def test_tensors_are_put_where_a_module_keeps_them() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    assert isinstance(module, torch_private.BatchNorm)
    assert vars(module).keys() >= torch_private.REGISTRIES
    assert torch_private.temporary_buffers(module) == {"scratch"}
    torch_private.put(module, "weight", nn.Parameter(torch.full((2,), 7.0)))
    torch_private.put(module, "running_mean", torch.full((2,), 8.0))
    assert module.weight.tolist() == [7, 7]
    assert torch_private.buffers_of(module)["running_mean"] is module.running_mean
    assert module.state_dict()["running_mean"].tolist() == [8, 8]


def test_norms_are_those_of_each_tensor() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([[5.0], [12.0]])]
    assert [one.item() for one in torch_private.norms(tensors)] == [5, 13]


def test_all_tensors_of_a_list_are_copied_to() -> None:
    tensors = [torch.zeros(2), torch.zeros((), dtype=torch.int64)]
    torch_private.copy_all(tensors, [torch.tensor([3.0, 4.0]), torch.tensor(5)])
    assert [one.tolist() for one in tensors] == [[3, 4], 5]


def test_matrices_are_multiplied_in_8_bits() -> None:
    a, scale = torch.eye(16).to(torch.float8_e4m3fn), torch.tensor(3.0)
    product = torch_private.scaled_mm(
        a, a.t(), scale_a=scale, scale_b=torch.ones(()), out_dtype=torch.bfloat16
    )
    assert torch.equal(product, 3 * torch.eye(16, dtype=torch.bfloat16))


def test_ddp_ignores_buffers_and_expects_gradients(world: None) -> None:  # noqa: ARG001
    module = nn.BatchNorm1d(2)
    torch_private.ignore_in_ddp(module, {"running_mean"})
    ddp = DistributedDataParallel(module)
    assert ddp.parameters_to_ignore == {"running_mean"}
    torch_private.expect_gradients(ddp, [])
    ddp.require_forward_param_sync = True  # its next forward pass broadcasts buffers
    weights = [*module.parameters()]
    torch.autograd.backward(weights, [torch.full_like(one, torch.nan) for one in weights])
    assert all(one.grad is not None and one.grad.isnan().all() for one in weights)
    ddp(torch.ones(2, 2)).sum().backward()  # the pass was complete


def test_a_unit_adds_up_zeros_for_weights_without_a_gradient(world: None) -> None:  # noqa: ARG001
    first, spare = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    unit, noted = nn.Sequential(first, spare), defaultdict[Any, bool](bool)
    fully_shard(unit, mesh=init_device_mesh("cpu", (1,)))
    torch_private.reduce_unused(unit, noted)
    unit.forward = first.forward  # type: ignore[method-assign]
    unit(torch.ones(3, 2)).sum().backward()
    if hasattr(unit, "set_reduce_scatter_unused_params"):  # torch 2.14
        uses = [(first.weight, True), (first.bias, True), (spare.weight, False)]
        assert list(noted.items()) == uses
        gradient: Any = spare.weight.grad
        assert gradient.full_tensor().tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_collectives_are_counted_and_time_out(world: None) -> None:  # noqa: ARG001
    before = sum(torch_private.collectives_started().values())
    dist.all_reduce(torch.ones(1))
    counts = torch_private.collectives_started()
    assert not counts or sum(counts.values()) >= before
    group = dist.new_group([0], timeout=timedelta(seconds=5))
    torch_private.set_timeout(timedelta(seconds=77))
    for counted in (dist.group.WORLD, group):
        backend = counted._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        assert backend.options._timeout == timedelta(seconds=77)


def test_memory_of_a_gpu_is_recorded(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        for name in ("_record_memory_history", "_dump_snapshot"):
            assert callable(getattr(torch.cuda.memory, name))
        options = inspect.signature(torch.cuda.memory._record_memory_history_impl).parameters
        assert {"enabled", "max_entries"} <= options.keys()
        return
    torch_private.record_memory(True)
    torch.ones(4, device="cuda")
    torch_private.dump_memory(tmp_path / "memory.pickle")
    torch_private.record_memory(False)
    assert (tmp_path / "memory.pickle").stat().st_size


def test_an_imaginary_world_has_many_ranks() -> None:
    dist.init_process_group("fake", store=torch_private.fake_store(), rank=0, world_size=512)
    try:
        dist.all_reduce(torch.ones(1))
        assert dist.get_world_size() == 512
    finally:
        dist.destroy_process_group()


def test_the_first_optimizer_imports_the_compiler() -> None:
    importlib.import_module(torch_private.COMPILER)
    assert torch_private.COMPILER in sys.modules


def test_the_overridden_methods_exist() -> None:
    """Else torch would never call them."""
    bases = {overrides.Zero1: ZeroRedundancyOptimizer, overrides.BatchNormOfAll: nn.BatchNorm1d}
    if torch.__version__.startswith("2.11."):
        bases[overrides.Stage] = PipelineStage
    for own, base in bases.items():
        names = [name for name, value in vars(own).items() if inspect.isfunction(value)]
        assert names and all(inspect.isfunction(getattr(base, name)) for name in names)
    assert inspect.isfunction(vars(ZeroRedundancyOptimizer)["_partition_parameters"])


def test_no_other_class_overrides_a_private_method_of_torch() -> None:
    overridden = []
    for info in pkgutil.walk_packages(rollcall.train.__path__, "rollcall.train."):
        if info.name.endswith("__main__") or info.name.startswith(torch_private.__name__):
            continue
        for kind in vars(importlib.import_module(info.name)).values():
            if inspect.isclass(kind) and kind.__module__ == info.name:
                bases = [one for one in kind.__mro__ if one.__module__.split(".")[0] == "torch"]
                functions = {name for name, value in vars(kind).items() if inspect.isroutine(value)}
                names = functions & {name for base in bases for name in vars(base)}
                overridden += [
                    f"{kind.__qualname__}.{name}" for name in names if name[0] == "_" != name[1]
                ]
    assert overridden == []
