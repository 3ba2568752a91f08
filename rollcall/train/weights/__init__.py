"""The initial weights of a model: random numbers, or stored weights."""
