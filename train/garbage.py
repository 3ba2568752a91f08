"""When does Python look for garbage? Between steps, and on all ranks alike.

A collection in the middle of a step of one rank lets all others wait for it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 100
"""Steps between two collections."""


@contextmanager
def between_steps() -> Iterator[None]:
    """While it is open, Python collects only when `collect` says so."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # what is there now stays to the end
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def collect(step: int) -> None:
    """Collect what became garbage lately, if it is time for that."""
    if step % EVERY == EVERY - 1:
        gc.collect(1)
