"""`python -m rollcall COMMAND`: the same as `rollcall COMMAND`."""

from rollcall.cli.program import run

if __name__ == "__main__":
    run()
