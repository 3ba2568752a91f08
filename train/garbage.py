"""Run Python's garbage collector between steps, on all ranks after the same steps.

A collection in the middle of one rank's step would make all other ranks wait.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL = 100
"""Steps between two collections."""


@contextmanager
def between_steps() -> Iterator[None]:
    """Let Python collect garbage only in `collect` while the context is open."""
    was_enabled = gc.isenabled()
    gc.collect()  # what is left is in the oldest generation, which `collect` does not scan
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect(step: int) -> None:
    """Collect recent garbage if a collection is due after this step."""
    if step % INTERVAL == INTERVAL - 1:
        gc.collect(1)
