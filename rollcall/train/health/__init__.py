"""The health of the ranks: hangs, different replicas, code or spread models."""
