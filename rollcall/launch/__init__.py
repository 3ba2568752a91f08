"""The code around the training: login node, job, supervisors, the parent of the ranks."""
