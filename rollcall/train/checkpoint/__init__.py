"""Checkpoints: saved beside the training, checked when loaded.

`contents`, `manifest`, `layout` and `write` need no torch, so any machine can inspect a checkpoint.
"""
