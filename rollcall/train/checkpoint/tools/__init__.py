"""Look at, check and export checkpoints."""
