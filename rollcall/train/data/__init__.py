"""The data: sets of samples, their order, and how a rank reads its share of each batch."""
