"""Checks of a machine before it trains. `table.md` explains each check; the functions do them."""
