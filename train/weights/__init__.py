"""What do the weights of a model start from? Random numbers, or the weights of a file."""
