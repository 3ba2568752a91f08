"""Where does the time go? Phases of a step by rank, late ranks, growing memory, FLOPs, traces."""
