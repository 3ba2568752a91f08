"""The commands about runs: one module with a `main(argv)` per command."""
