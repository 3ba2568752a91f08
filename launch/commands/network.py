"""`rollcall network --nodes N`: measure the network between the nodes of a job.

Takes the options of `rollcall submit`; after `--`, the measurement takes --sizes and --json.
"""

from collections.abc import Sequence

from rollcall.launch.submission import command

USAGE = "usage: rollcall network [options of rollcall submit] [-- --sizes 64K,16M] [-- --json]"


def main(argv: Sequence[str]) -> int:
    """Submit the measurement and wait for it; return its exit code."""
    if {"-h", "--help"} & {*argv}:
        print(f"{USAGE}\n\n{__doc__}")
        return 0
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    program = ["--", "-m", "rollcall.train.network", *words[end + 1 :]]
    return command.main(["--wait", *words[:end], *program])
