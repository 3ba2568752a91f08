"""What does `python -m train` do besides training? No torch."""

COMMANDS = {
    "checkpoint": "train.checkpoint.command",
    "explain": "train.explain",
    "generate": "train.inference.generate",
    "matrix": "train.proof.matrix",
    "plan": "train.plan",
    "predict": "train.inference.predict",
    "replay": "train.faults.replay",
    "verify": "train.proof.verify",
}
"""Modules with a `main(words)`, by the first word of the command line."""
