"""Products beside the core, which does not import them: only the table of commands names them."""
