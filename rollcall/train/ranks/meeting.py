"""Attempts of all ranks, in which none waits for a message of one that has failed."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed.tensor import DTensor

from rollcall.train.ranks.world import World
from rollcall.train.torch_private import MESSAGES, TorchDispatchMode, without_modes

SENDING = {"c10d", *MESSAGES}
"""Namespaces of the operations that send to other ranks."""


class Failed(MemoryError):
    """Raised on the other ranks of an attempt if one has failed."""


class Meeting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of operations in which all ranks meet before each message of an attempt."""

    def __init__(self, world: World) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._world, self.sent = world, False  # whether there was a message

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Let the other ranks leave this context by Failed if one leaves it by an exception.

        They do so before their next message within the mode, or at the end.
        """
        try:
            yield
            while not self._meet(is_done=True):
                pass
        except Failed:
            raise
        except (Exception, SystemExit):
            with suppress(Failed):
                self._meet(has_failed=True)
            raise

    def before(self, func: Any) -> None:
        """Meet before an operation that sends; raise Failed if a rank will not take part."""
        apart = "wait", "send", "recv", "_wrap"
        if getattr(func, "namespace", "") in SENDING and not func.__name__.startswith(apart):
            self.sent = True
            self._meet()

    def _meet(self, has_failed: bool = False, is_done: bool = False) -> bool:
        with without_modes():
            failed, done = self._world.sum(has_failed, is_done)
        if failed:
            raise Failed
        return done == self._world.world_size

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]  # of the class
        """Let torch compile."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # what it computes with its parts comes here again
        self.before(func)
        return func(*args, **(kwargs or {}))
