"""Profiling: phases of a step by rank, late ranks, growing memory, FLOPs, traces."""
