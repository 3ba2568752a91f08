"""The files of the run directory: each has one owner here, which writes and reads it. No torch."""
