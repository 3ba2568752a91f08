"""Benchmarks: `rollcall bench NAME` prints tables."""
