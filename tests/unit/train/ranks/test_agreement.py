"""The vector of a step's numbers has one layout on all ranks, wherever the numbers are."""

from dataclasses import dataclass
from typing import Any

import torch

from rollcall.train.ranks import agreement


@dataclass
class Numbers:
    """Two numbers, of which one may be on the GPU of some ranks alone."""

    count: Any
    exhausted: Any


class OnGpu(torch.Tensor):
    """A number that says that it is on a GPU."""

    is_cuda = True


def test_a_number_that_is_on_the_gpu_of_one_rank_alone_keeps_its_position() -> None:
    on_gpu, on_host = torch.tensor(8.0).as_subclass(OnGpu), 0.0
    ranks = [
        (0.5, [Numbers(on_gpu, False), {"most": [on_gpu, 0.0]}]),
        (0.0, [Numbers(on_host, True), {"most": [0.0, on_gpu]}]),
    ]
    device = torch.device("cpu")
    packed = [agreement._packed(seconds, reports, device) for seconds, reports in ranks]
    sums = sum(vector for vector, _ in packed).tolist()  # type: ignore[union-attr]
    assert sums[0] == 0.5
    for _, layouts in packed:
        numbers, largest = agreement._unpacked(sums, layouts)
        assert (numbers.count, numbers.exhausted) == (8.0, 1.0)
        assert largest == {"most": [8.0, 8.0]}
