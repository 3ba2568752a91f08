"""One process with several GPUs: a replica on each, or some layers on each."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DataParallel

from train.config import Config
from train.data.source import Batch
from train.parallel.layers import Group, balance, groups_of, span
from train.parallel.part import Part, local_bytes, size
from train.schema import ConfigError
from train.world import World


class Threads(Part):
    """nn.DataParallel: a thread and a replica for each GPU."""

    def __init__(self, _config: Config, _world: World, _mesh: DeviceMesh | None) -> None: ...

    def wrap(self, module: nn.Module) -> nn.Module:
        """DataParallel around the model."""
        return DataParallel(module)

    def rejoin(self, model: nn.Module) -> bool:  # noqa: ARG002
        """No other rank waits in a forward or backward."""
        return True

    def describe(self, model: nn.Module) -> str:
        """What the GPUs exchange, if there are any."""
        count = torch.cuda.device_count()
        if count < 2:
            return f"nn.DataParallel found {count} GPUs, so it passes through to the plain model."
        return (
            f"nn.DataParallel copies {size(local_bytes(model))} of weights to {count} GPUs "
            "for each micro-batch, and adds as many gradients on the first."
        )


class Layers(Part):
    """Consecutive layers on each device; a micro-batch goes from one device to the next."""

    places = True

    def __init__(self, config: Config, world: World, _mesh: DeviceMesh | None) -> None:
        self._world = world
        self._by = config.parallel.balance
        self.devices = [world.device]
        if world.device.type == "cuda":
            self.devices = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
        self._groups: list[Group] = []

    def check(self, model: nn.Module, example: Batch) -> None:
        """Find the layers and their costs; at least one for each device."""
        if len(self.devices) > 1:
            self._groups = groups_of(model, example.inputs[:1], self._world, self._by)
            if len(self._groups) < len(self.devices):
                raise ConfigError(
                    f"the model has {len(self._groups)} layers with weights for "
                    f"{len(self.devices)} GPUs: show it at most {len(self._groups)} "
                    "(CUDA_VISIBLE_DEVICES)"
                )

    def apply(self, model: nn.Module) -> None:
        """Place the layers, and let each device's first one fetch what it computes on."""
        if len(self.devices) == 1:
            model.to(self.devices[0])
            return
        bounds = balance([group.cost for group in self._groups], len(self.devices))
        for number, device in enumerate(self.devices):
            held = self._groups[bounds[number] : bounds[number + 1]]
            layers = [layer for group in held for layer in group.layers.values()]
            for layer in layers:
                layer.to(device)
            layers[0].register_forward_pre_hook(
                lambda _, inputs, device=device: tuple(x.to(device) for x in inputs)
            )
        home = self._world.device
        layers[-1].register_forward_hook(lambda _, __, outputs: outputs.to(home))

    def describe(self, model: nn.Module) -> str:  # noqa: ARG002
        """Which layers lie where."""
        if len(self.devices) == 1:
            return "There is one device to hold the layers, so all of them lie there."
        bounds = balance([group.cost for group in self._groups], len(self.devices))
        places = []
        for number, device in enumerate(self.devices):
            held = self._groups[bounds[number] : bounds[number + 1]]
            places.append(f"{span([name for group in held for name in group.names])} on {device}")
        return f"Layers {', '.join(places)}; activations go from one to the next."
