"""`python launch/submit.py --nodes 2 digits`: start a run, on Slurm or on this machine.

The front door of a checkout: the same as `rollcall submit`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from rollcall.cli.program import run

    run("submit")
