"""Let `import rollcall` find the checkout whose env/run started this process, in any directory.

env/run copies this file into its environments, whose Pythons import it when they start. The package
is found after all other modules, and nothing else of the checkout is: `import train` is the user's.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class Checkout:
    """A finder for `sys.meta_path`."""

    @staticmethod
    def find_spec(
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG004
        target: ModuleType | None = None,  # noqa: ARG004
    ) -> ModuleSpec | None:
        """Return the spec of the package; None for any other module, or without env/run."""
        root = os.environ.get("ROLLCALL_CHECKOUT")
        return PathFinder.find_spec(name, [root]) if root and name == "rollcall" else None


sys.meta_path.append(Checkout)
