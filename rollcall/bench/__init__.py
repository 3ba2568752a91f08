"""Benchmarks: `python -m rollcall.bench NAME` prints a table."""
