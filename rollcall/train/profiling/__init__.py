"""Profiling: phases of a step by rank, late ranks, FLOPs, traces."""
