"""Look at, check, compare and export checkpoints."""
