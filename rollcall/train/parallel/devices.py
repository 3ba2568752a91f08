"""One process with several GPUs: a replica or some layers on each."""

from collections import Counter
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DataParallel

from rollcall.config import Config, ConfigError
from rollcall.train.data.source import Batch
from rollcall.train.parallel.layers import balance, groups_of
from rollcall.train.parallel.part import Part, one_input
from rollcall.train.ranks.world import World


class ReplicaPerGpu(Part):
    """nn.DataParallel: a thread and a replica for each GPU."""

    finishes_alone = True  # no other rank waits

    def __init__(self, _config: Config, _world: World, _mesh: DeviceMesh | None) -> None: ...

    def wrap(self, module: nn.Module) -> nn.Module:
        """Wrap the model in DataParallel."""
        return DataParallel(module)


class LayersPerGpu(Part):
    """Consecutive layers on each GPU; a micro-batch passes from one GPU to the next."""

    places = True

    def __init__(self, config: Config, world: World, _mesh: DeviceMesh | None) -> None:
        self._world = world
        self._by = config.parallel.balance
        gpus = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
        self.devices = gpus if world.device.type == "cuda" else [world.device]
        self._held: list[dict[str, nn.Module]] = []  # the layers on each device

    def check(self, model: nn.Module, example: Batch) -> None:
        """Divide the layers by their costs; each GPU needs at least one."""
        if len(self.devices) == 1:
            return
        groups = groups_of(
            model, one_input(example, "a model divided over GPUs")[:1], self._world, self._by
        )
        if len(groups) < len(self.devices):
            raise ConfigError(
                f"the model has {len(groups)} layers with weights for {len(self.devices)} GPUs; "
                f"select at most {len(groups)} with CUDA_VISIBLE_DEVICES"
            )
        bounds = balance([group.cost for group in groups], len(self.devices))
        self._held = [
            {name: layer for group in groups[first:end] for name, layer in group.layers.items()}
            for first, end in pairwise(bounds)
        ]

    def apply(self, model: nn.Module) -> None:
        """Place the layers; the first layer on each device copies its inputs there."""
        if len(self.devices) == 1:
            model.to(self.devices[0])
            return
        uses = Counter(id(layer) for held in self._held for layer in held.values())
        for device, held in zip(self.devices, self._held, strict=True):
            for layer in held.values():
                layer.to(device)
            # Not an activation that stands in several places, also on other devices.
            layers = [layer for layer in held.values() if uses[id(layer)] == 1]
            layers[0].register_forward_pre_hook(
                lambda _, inputs, device=device: tuple(x.to(device) for x in inputs)
            )
        home = self._world.device
        layers[-1].register_forward_hook(lambda _, __, outputs: outputs.to(home))
