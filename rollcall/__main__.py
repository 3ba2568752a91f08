"""`python -m rollcall COMMAND`: the same as `rollcall COMMAND`."""

from rollcall.cli import run

if __name__ == "__main__":
    run()
