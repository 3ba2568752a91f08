"""Stops a Python that lacks rollcall's packages, with what to do. What starts imports it first."""

import importlib.util
import sys

if importlib.util.find_spec("pydantic") is None:
    print(
        f"rollcall: error: {sys.executable} has no package 'pydantic', and so not what rollcall "
        "needs: put ./env/run before the command, which makes an environment for it once",
        file=sys.stderr,
    )
    sys.exit(2)
