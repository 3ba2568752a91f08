"""`torchrun --nproc_per_node=4 -m train`: train, or run one of the commands of `train/`."""

from rollcall.cli.program import run

if __name__ == "__main__":
    run("train")
