"""The needs of a user's program in a job: its Python, modules and data."""
