"""`torchrun --nproc_per_node=4 -m rollcall.train`: train, or run a command about models."""

from rollcall.cli.program import run

if __name__ == "__main__":
    run("train")
