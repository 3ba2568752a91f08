"""The only place that calls Slurm's commands and reads their output."""
