"""Several optimizers as one, each for some groups of parameters; and Muon for sharded weights."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from rollcall.config.schema import ConfigError


class Combined(torch.optim.Optimizer):
    """Steps several optimizers. Groups and state are theirs, in the order of the given groups."""

    def __init__(self, parts: Sequence[tuple[list[int], torch.optim.Optimizer]]) -> None:
        """Combine optimizers, each with the places of its groups."""
        self._parts = [(places, part) for places, part in parts if places]
        groups = {
            place: group
            for places, part in self._parts
            for place, group in zip(places, part.param_groups, strict=True)
        }
        super().__init__([dict(groups[place]) for place in sorted(groups)], {})
        self._share()

    def _share(self) -> None:
        for places, part in self._parts:
            part.state = self.state
            part.param_groups = [self.param_groups[place] for place in places]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Let each optimizer update its parameters."""
        assert closure is None, "a training step has no closure"
        for _, part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state of all."""
        super().load_state_dict(state_dict)
        self._share()


def use_whole_matrices() -> None:
    """Let torch's Muon orthogonalize whole matrices where it holds shards of them.

    Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) multiplies a matrix with itself
    in bf16, so that pieces would round in another way. Each rank gathers the update of one matrix
    at a time, computes the same as one process would, and keeps its shard.
    """
    from torch.optim import _muon

    whole: Callable[..., torch.Tensor] | None = getattr(_muon, "_zeropower_via_newtonschulz", None)
    if whole is None:
        raise ConfigError(
            f"optim.name=Muon: torch {torch.__version__} has another Muon than rollcall knows; "
            "use an own class as package.module:attribute"
        )
    if not hasattr(whole, "__wrapped__"):
        _muon._zeropower_via_newtonschulz = _of_whole(whole)


def _of_whole(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(function)
    def gathered(update: torch.Tensor, *options: Any) -> torch.Tensor:
        if not isinstance(update, DTensor):
            return function(update, *options)
        mesh, everywhere = update.device_mesh, [Replicate()] * update.device_mesh.ndim
        found = function(update.full_tensor(), *options)
        shared = DTensor.from_local(found, mesh, everywhere, run_check=False)
        return shared.redistribute(mesh, update.placements)

    return gathered
