"""The ranks of a run: how they find each other, agree on a step, and stop together."""
