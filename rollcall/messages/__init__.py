"""Refusals, and words and tables in messages. No torch."""
