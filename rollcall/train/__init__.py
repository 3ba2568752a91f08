"""The computation of every rank. Knows nothing of the launcher."""
