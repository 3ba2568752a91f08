"""The commands about runs: a module with a `main(argv)` for each."""
