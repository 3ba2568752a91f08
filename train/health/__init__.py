"""Is a rank well? Hangs, stragglers, replicas that differ."""
