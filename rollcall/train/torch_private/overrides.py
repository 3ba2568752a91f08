"""Classes of torch of which private methods are overridden."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import PrepareModuleInput

from rollcall.train.torch_private import BatchNorm


class Zero1(ZeroRedundancyOptimizer):
    """Sends no frozen weights, unlike torch (2.15); loads groups of which a rank has no tensor."""

    def _sync_param_groups(self: Any, source: Any, target: Any) -> None:
        mine = self._partition_parameters()[self.rank]
        held = [number for number, group in enumerate(mine) if group["params"]] or range(len(mine))
        pairs = [
            [groups[number] for number in held] if groups is self.param_groups else groups
            for groups in (source, target)
        ]
        super()._sync_param_groups(*pairs)  # type: ignore[misc]

    def _broadcast_params_from_rank(self: Any, rank: int) -> list[Any]:
        source = dist.get_global_rank(self.process_group, rank)
        return [
            dist.broadcast(weight.data, source, self.process_group, async_op=True)
            for group in self._partition_parameters()[rank]
            for weight in group["params"]
            if weight.requires_grad
        ]


class FirstInput(PrepareModuleInput):
    """Prepares the first input of a module, and passes on the others, such as a mask."""

    def _prepare_input_fn(self, inputs: Any, device_mesh: Any) -> Any:
        first = super()._prepare_input_fn(inputs[:1], device_mesh)  # type: ignore[no-untyped-call]
        return (*first, *inputs[1:])


class BatchNormOfAll(BatchNorm):
    """Accepts images, sequences and volumes, by a method that each class of torch's has."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass


class Stage(PipelineStage):
    """Sends nothing to its own rank, as torch 2.11 does; a later torch has no such method."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        parent: Any = super()  # the stubs of some versions of torch lack the method
        ops: list[dist.P2POp] = parent._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]
