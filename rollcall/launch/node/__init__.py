"""The supervisor, which runs once on every node, and its parts."""
