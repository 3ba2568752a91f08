"""Use the trained model of a run: predictions for a data set or files, and generated text."""
