"""How does training survive a crash? By checkpoints, saved beside it and checked when loaded.

`contents`, `manifest`, `layout` and `write` need no torch, so any machine can inspect a checkpoint.
"""
