"""`python -m launch COMMAND`: the same commands as `rollcall COMMAND`."""

from rollcall.cli.program import run

if __name__ == "__main__":
    run()
