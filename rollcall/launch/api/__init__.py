"""The launching from Python: the functions and classes that `import rollcall` offers."""
