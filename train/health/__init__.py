"""Is a rank well? Hangs, replicas that differ."""
