"""Checkpoints: saved beside the training, checked when loaded; to inspect them needs no torch."""
