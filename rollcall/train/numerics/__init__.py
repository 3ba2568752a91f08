"""Losses, optimizers, number formats, random numbers."""
