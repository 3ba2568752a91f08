"""Mark what a thread is doing, so that the watchdog can report where a rank hangs.

Entering and leaving takes less than a microsecond. In a generator, use the context manager around
the code that blocks, with no `yield` inside.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
IDLE = ("between steps", False)

# The activities of each thread, outermost first. The entry of a thread that has ended is kept: the
# operating system reuses its number.
_stacks: defaultdict[int, list[tuple[str, bool]]] = defaultdict(list)


class doing:
    """A context manager and decorator that marks what the current thread is doing; may be nested.

    `what` completes "rank 3 was …"; it `may_take_long` if minutes without progress are normal.
    """

    def __init__(self, what: str, *, may_take_long: bool = False) -> None:
        self._activity = (what, may_take_long)

    def __enter__(self) -> None:
        _stacks[get_ident()].append(self._activity)

    def __exit__(self, *_: object) -> None:
        _stacks[get_ident()].pop()

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Return the function in this context; contextlib's decorator takes three times as long."""

        @wraps(function)
        def marked(*args: P.args, **kwargs: P.kwargs) -> T:
            stack = _stacks[get_ident()]
            stack.append(self._activity)
            try:
                return function(*args, **kwargs)
            finally:
                stack.pop()

        return marked


def of(thread: int) -> tuple[str, bool]:
    """Return a thread's innermost activity that may take long, otherwise the innermost one."""
    stack = tuple(_stacks.get(thread, ()))  # one step: the thread may change its list meanwhile
    slow = tuple(activity for activity in stack if activity[1])
    return (slow or stack or (IDLE,))[-1]
