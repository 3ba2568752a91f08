"""Turn a command line into a submitted job, on the login node; RefusedError says why not."""
