"""Recovery from a bad step: non-finite numbers, memory, loss spikes."""
