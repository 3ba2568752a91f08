"""Count what ranks send, for tests."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives by name while its context is open.

    CommDebugMode of torch 2.11 fails under DDP.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()  # of the largest tensor of each

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
            tensors = [one for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
            largest = max((tensor.nbytes for tensor in tensors), default=0)
            self.bytes[func.overloadpacket.__name__] += largest
        return func(*args, **(kwargs or {}))
